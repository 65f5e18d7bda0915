"""Writes the tables of README.md and benchmarks/README.md from results/*.jsonl: `python -m benchmarks.readme_tables [--check]`.

A table lies between `<!-- table NAME -->` and `<!-- /table -->` on one of the pages; everything between is replaced by what the
newest lines say. A table without lines stays as it is, and is named.

    step      one decode step by component, and its largest kernels: time, share of the step, share of its own roofline
    decode    whole steps of each deployment against their roofline, and the ratios of the cache formats
    prefill   time to the first token
    startup   start-up of a worker, capture of its graphs

and those of benchmarks/tables.py, on kernels, fidelity and quality, of benchmarks/mtp_tables.py, on speculation, and of
benchmarks/serving_tables.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import mtp_tables, serving_tables, tables
from benchmarks.records import RESULTS, ROOT, newest, read, revisions
from benchmarks.tables import markdown

Line = dict[str, Any]
SHOWN = {"shape": "deepseek_v3.1", "dp": 8, "tp": 1, "format": "fp8", "context": 32768, "batch": 16}  # the step of the profile
KERNELS_OF_A_PART = 3  # the largest
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
SMALL = 0.01  # of a step; smaller kernels have no row


def matching(lines: Iterable[Line], **fixed: Any) -> list[Line]:
    return [line for line in lines if all(line.get(name) == value for name, value in fixed.items())]


def world(line: Line) -> str:
    label = f"{line['shape']}, DP{line['dp']}/TP{line['tp']}"
    return f"{label}, one SIMULATED rank" if line["simulated"] else label


def source(*lines: Line) -> str:
    """Device and versions of the last line, revisions of all."""
    line = lines[-1]
    return f"{line['device']}, torch {line['torch']}, {line['date'][:10]}, {revisions(lines)}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def thousands(tokens: int) -> str:
    return f"{tokens >> 10}k"


# ---- one step


def step(results: Path) -> list[str] | None:
    lines = [line for line in matching(read(results / "decode.jsonl"), figure="decode", **SHOWN) if "profiled_us" in line]
    return None if not lines else step_table(lines[-1])


def step_table(line: Line) -> list[str]:
    """Components in the order of their kernels' time, each followed by the largest of them. Of kernels that overlap the time
    goes to the earlier one, so that everything adds up to the profiled step."""
    us = line["profiled_us"]
    parts = {name: part["roofline_us"] for name, part in line["parts"].items()}
    kernels: dict[str, list[tuple[str, float, float]]] = {}
    for name, spent, launches, part in line["kernels"]:
        kernels.setdefault(part, []).append((name, spent, launches))
    totals = {part: sum(spent for _, spent, _ in found) for part, found in kernels.items()}
    rows: list[Sequence[object]] = []
    for part in sorted(totals, key=lambda name: -totals[name]):
        least = parts.get(part, 0.0)
        own = percent(least / totals[part]) if least >= SMALL * us else ""
        launches = round(sum(count for *_, count in kernels[part]))
        rows.append(
            (f"**{part}**", launches, f"{totals[part] / 1e3:.2f}", percent(totals[part] / us), f"{least / 1e3:.2f}", own)
        )
        for name, spent, count in kernels[part][:KERNELS_OF_A_PART]:
            if spent >= SMALL * us:
                rows.append((f"`{short(name)}`", round(count), f"{spent / 1e3:.2f}", percent(spent / us), "", ""))
    gaps = f"{100 * line['host_gap']:.1f} % (profiler) and {100 * line['host_gap_events']:.1f} % (events)"
    waits = us - line["busy_us"]
    rows.append(("no kernel runs", "", f"{max(0.0, waits) / 1e3:.2f}", percent(max(0.0, waits) / us), "", ""))
    rows.append(
        ("**step**", round(sum(count for _, _, count, _ in line["kernels"])), f"**{us / 1e3:.2f}**", "", f"{line['roofline_us'] / 1e3:.2f}", percent(line["roofline_us"] / us))
    )  # fmt: skip
    text = (
        f"{world(line)}: {line['format'].upper()} cache, {line['batch']} sequences of {thousands(line['context'])} tokens, "
        f"{line['step_us'] / 1e3:.1f} ms a step, {line['tokens_per_s_per_gpu']:.0f} tokens/s per GPU; host gap {gaps}; {source(line)}."
    )
    return [text, "", *markdown(("component, kernel", "launches", "ms", "of the step", "roofline ms", "of its roofline"), rows)]


def short(kernel: str) -> str:
    """A kernel's name without template arguments and namespaces."""
    name = re.sub(r"<.*", "", kernel.removeprefix("void ")).split("::")[-1]
    return name if len(name) <= 40 else name[:39] + "…"


# ---- whole steps


def decode(results: Path) -> list[str] | None:
    lines = read(results / "decode.jsonl")
    cases = newest(matching(lines, figure="decode"), "shape", "dp", "tp", "format", "context", "batch", "simulated")
    cases = [line for line in cases if "operations" in line]
    if not cases:
        return None
    rows = [
        (
            world(line), line["format"].upper(), f"{line['batch']} x {thousands(line['context'])}", line["kind"], f"{line['step_us'] / 1e3:.1f} ms",
            f"{line['tokens_per_s_per_gpu']:.0f}", percent(line["roofline_share"]), *(f"{line['parts'].get(part, {'us': 0.0})['us'] / 1e3:.1f}" for part in ("attention", "linears", "experts")),
        )
        for line in cases
    ]  # fmt: skip
    head = (
        "deployment",
        "cache",
        "batch",
        "which",
        "step",
        "tokens/s per GPU",
        "of the roofline",
        "attention ms",
        "linears ms",
        "experts ms",
    )
    text = [f"{source(*cases)}; {cases[-1]['method']}.", "", *markdown(head, rows)]
    ratios = newest(matching(lines, figure="decode_ratios"), "shape", "dp", "tp", "context", "simulated")
    if ratios:
        head = (
            "deployment",
            "context",
            "attention in the step (alone), equal batch",
            "largest batches",
            "tokens/s",
            "the two rooflines",
            "reached",
        )
        rows = [
            (
                world(line), thousands(line["context"]), f"{line['attention_step_ratio']:.2f}x ({line['attention_ratio']:.2f}x) at {line['equal_batch']}", " and ".join(map(str, line["largest_batches"])),
                f"{line['tokens_ratio']:.2f}x", f"{line['roofline_ratio']:.2f}x", f"{line['tokens_ratio'] / line['roofline_ratio']:.2f}",
            )
            for line in ratios
        ]  # fmt: skip
        text += ["", "FP8 over BF16 cache:", "", *markdown(head, rows)]
    return text


# ---- prompts and start-up

PREFILL_PARTS = ("attention", "linears", "experts", "norms", "exchange")  # of benchmarks.prefill, which needs torch


def prefill(results: Path) -> list[str] | None:
    lines = newest(read(results / "prefill.jsonl"), "model", "world", "tokens", "chunk")
    if not lines:
        return None
    rows = []
    for line in lines:
        parts = {part: sum(o["seconds"] for o in line["operations"] if o["part"] == part) for part in PREFILL_PARTS}
        other = line["timed_seconds"] - sum(parts.values())
        rows.append(
            (
                f"{line['model']}{', one SIMULATED rank of ' + line['world'] if line['world'] else ''}", line["tokens"], f"{1e3 * line['first_token_seconds']:.0f} ms",
                f"{line['tokens_per_s']:.0f}", percent(line["roofline_share"]), *(f"{1e3 * seconds:.0f}" for seconds in (*parts.values(), other)),
            )
        )  # fmt: skip
    head = (
        "model",
        "prompt tokens",
        "first token",
        "prompt tokens/s",
        "of the roofline",
        *(f"{part}, ms" for part in PREFILL_PARTS),
        "other, ms",
    )
    return [f"{source(*lines)}; {lines[-1]['method']}.", "", *markdown(head, rows)]


def startup(results: Path) -> list[str] | None:
    lines = [line for line in newest(read(results / "startup.jsonl"), "model", "world", "max_num_seqs") if "all_graphs" in line]
    if not lines:
        return None
    rows = [
        (
            f"{line['model']}{', one SIMULATED rank of ' + line['world'] if line['world'] else ''}", f"{line['worker_seconds']:.0f} s",
            *(f"{line[f'{name}_graphs']} graphs: {line[f'{name}_graphs_seconds']:.1f} s, {line[f'{name}_graphs_bytes'] / 1e9:.2f} GB" for name in ("all", "fast")),
        )
        for line in lines
    ]  # fmt: skip
    head = ("model", "weights, sizing, cache", "default captures", "`--fast-start`")
    return [f"{source(*lines)}.", "", *markdown(head, rows)]


TABLES: dict[str, Callable[[Path], list[str] | None]] = {
    "step": step,
    "decode": decode,
    "prefill": prefill,
    "startup": startup,
} | {**tables.TABLES, **mtp_tables.TABLES, **serving_tables.TABLES}


def written(page: str, tables: dict[str, list[str]]) -> str:
    """The page with those of the tables that it has marks for between their marks."""
    for name, lines in tables.items():
        before, begin, rest = page.partition(f"<!-- table {name} -->\n")
        _, end, after = rest.partition("<!-- /table -->")
        if end:
            page = before + begin + "\n".join(lines) + "\n" + end + after
    return page


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a page is not what the results say")
    args = parser.parse_args(argv)
    found = {name: table(args.results) for name, table in TABLES.items()}
    for name in (name for name, lines in found.items() if lines is None):
        print(f"{name}: left as it is, no lines", file=sys.stderr)
    before = {page: page.read_text() for page in args.pages}
    for name in TABLES:
        if not any(f"<!-- table {name} -->" in text for text in before.values()):
            raise ValueError(f"no page has marks of the table {name!r}")
    after = {
        page: written(text, {name: lines for name, lines in found.items() if lines is not None})
        for page, text in before.items()
    }
    if not args.check:
        for page, text in after.items():
            page.write_text(text)
    return int(args.check and after != before)


if __name__ == "__main__":
    raise SystemExit(main())
