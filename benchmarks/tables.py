"""Tables on kernels, fidelity and quality, from results/*.jsonl; benchmarks/readme_tables.py writes them to the pages.

kernel      the decode kernels at batch 32, beside their rooflines
context     error against context length, summed in place and block by block
quality     the bundled model by cache format: perplexity, recall, answers, lm_eval through the server
hopper      perplexity with the Hopper kernels
probe       what the fidelity probe costs
simulation  real ranks beside their simulation
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.records import bootstrap, newest, read, revisions, wilson
from benchmarks.schemes import COMPARED

Line = dict[str, Any]
FORMATS = {"fp32": "FP32", "bf16": "BF16", "fp8": "**FP8, RoPE in BF16 (SnapMLA)**"}
LABEL = FORMATS | {scheme.name: f"{scheme.label} (simulated)" for scheme in COMPARED if scheme.name not in ("bf16", "snapmla")}
FP8_OVER_BF16 = 17 / 9  # Eq. 14: 512 + 512 of a tile's 576 + 512 dimensions run at twice the BF16 rate
FLOP = 2 * (576 + 512)  # a query row and token
TOKEN_BYTES = {"fp8": 644, "bf16": 1152}


def roofline(line: Line) -> tuple[float, float]:
    """(tensor peak, attainable) TFLOP/s of a case, from the matrix product and the page reads measured in the same run."""
    peak = line["bf16_matmul_tflops"] * (FP8_OVER_BF16 if line["format"] == "fp8" else 1.0)
    intensity = line["heads"] * line["query_len"] * FLOP / TOKEN_BYTES[line["format"]]  # FLOP a byte read once
    return peak, min(peak, line["read_rate_tb_per_s"] * intensity)


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]


def source(line: Line, name: str) -> str:
    """Where a table's numbers come from: results file, device, versions."""
    clocks = f", SM clock {line['sm_mhz']} MHz" if line.get("sm_mhz") else ""
    return f"`benchmarks/results/{name}.jsonl`: {line['device']}{clocks}, torch {line['torch']}, {line['date'][:10]}, {revisions([line])}"


# ---- kernels


def batch_of_32(results: Path) -> list[Line]:
    """The newest line of each kernel, format, heads, query length and context at batch 32, all of one file, so that formats are
    compared within one run: kernel_figures, or kernel_decode, which has the same method."""
    figures = [line for line in read(results / "kernel_figures.jsonl") if line.get("figure") == "fig7"]
    cases = [
        line for line in read(results / "kernel_decode.jsonl")
        if line.get("batch") == 32 and line["tokens"] == 32 * line["longest"] and "invariant" not in line["case"]
    ]  # fmt: skip
    return newest(figures or cases, "kernel", "format", "heads", "query_len", "longest")


def kernel(results: Path) -> list[str] | None:
    found = {
        (line["heads"], line["query_len"], line["format"]): line
        for line in batch_of_32(results)
        if line["longest"] == 32768 and line["kernel"] == "ours"
    }
    rows = []
    for heads, query_len in sorted({key[:2] for key in found}, key=lambda key: (-key[0], key[1])):
        both = [found.get((heads, query_len, fmt)) for fmt in ("fp8", "bf16")]
        if None in both or heads < 16 or (heads < 128 and query_len > 1):
            continue
        cells = [
            f"{x['us']:.0f} us, {x['tflops']:.0f} TFLOP/s, {x['tflops'] / roofline(x)[1]:.2f}" for x in both if x is not None
        ]
        fp8, bf16 = both
        assert fp8 is not None and bf16 is not None
        rows.append((f"{heads} heads, {query_len} query row{'s' * (query_len > 1)}", *cells, f"{bf16['us'] / fp8['us']:.2f}x"))
    if not rows:
        return None
    line = list(found.values())[-1]
    name = "kernel_figures" if "figure" in line else "kernel_decode"
    beside = {line["format"]: line for line in found.values()}
    ceilings = ", ".join(
        f"{beside[fmt]['read_rate_tb_per_s']:.2f} TB/s and {beside[fmt]['bf16_matmul_tflops']:.0f} TFLOP/s beside {fmt.upper()}"
        for fmt in ("fp8", "bf16")
    )
    text = (
        "Batch 32, 32k tokens each; time, rate, share of the roofline of pages read alone and of a BF16 product (FP8: 17/9 of it) "
        f"measured in the same run, {ceilings}. {source(line, name)}."
    )
    return [text, "", *markdown(("", "FP8 cache", "BF16 cache", "FP8 over BF16"), rows)]


# ---- fidelity


def context(results: Path) -> list[str] | None:
    lines = [
        line for line in read(results / "numerics.jsonl") if line.get("figure") == "context" and line["data"] == "synthetic"
    ]
    lines = newest((line for line in lines if line["mean"] == 0.5), "tokens", "sums")
    found = {(line["tokens"], line["sums"]): line for line in lines}
    lengths = [n for n in (4096, 16384, 32768, 65536, 131072, 262144) if (n, "single-level") in found]
    if len(lengths) < 2:
        return None
    rows = []
    for sums, label in (
        ("two-level, 64", "folded into FP32 every 64 tokens"),
        ("two-level, 128", "every 128, as the kernel does"),
        ("single-level", "in place, 13 bits"),
    ):
        rows.append((f"{label}: the sums alone", *(f"{found[n, sums]['alone'][0]:.1e}" for n in lengths)))
        rows.append((f"{label}: all roundings", *(f"{100 * found[n, sums]['relative'][0]:.1f} %" for n in lengths)))
    text = f"Relative L2 error of FP8 attention, synthetic latents with a mean of 0.5 standard deviations; {source(lines[-1], 'numerics')}."
    return [text, "", *markdown(("P.V summed", *(f"{n >> 10}k" for n in lengths)), rows)]


def probe(results: Path) -> list[str] | None:
    lines = [
        line for line in read(results / "kernel_figures.jsonl") if line.get("figure") == "probe" and "overhead_turns" in line
    ]
    lines = newest(lines, "model")
    if not lines:
        return None
    rows = []
    for line in lines:
        spans = []
        for name in ("overhead_writing", "overhead"):
            low, middle, high = 100 * np.quantile(line[f"{name}_turns"], (0.25, 0.5, 0.75))
            spans.append(f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})")
        name = "demo model" if line["model"] == "demo" else f"{line['model']}, {line['layers']} layers, one SIMULATED rank of 8"
        rows.append((f"{name}, batch {line['batch']}", f"{median(line['ms']['off']):.2f} ms", *spans))
    text = f"Medians and quartiles over turns of {lines[-1]['steps']} steps; {source(lines[-1], 'kernel_figures')}."
    head = ("step", "without the probe", "following, never comparing", "comparing 1 % of the steps")
    return [text, "", *markdown(head, rows)]


# ---- quality


def quality_lines(results: Path, figure: str, on: str = "cpu") -> dict[str, list[Line]]:
    """Newest lines of a part of benchmarks/quality.py by scheme."""
    keys = {
        "perplexity": ("document", "start"),
        "recall": ("distance", "prompt"),
        "generation": ("prompts",),
        "lm_eval": ("words",),
    }[figure]
    lines = [line for line in read(results / "quality.jsonl") if (line["figure"], line["on"]) == (figure, on)]
    found: dict[str, list[Line]] = {}
    for line in newest(lines, "scheme", *keys):
        found.setdefault(line["scheme"], []).append(line)
    return found


def perplexity_table(results: Path, on: str, reference: str) -> list[dict[str, Any]]:
    """Perplexity of every scheme over the rows all have, and its ratio to the reference's with a paired interval."""
    found = quality_lines(results, "perplexity", on)
    if reference not in found:
        return []
    rows = {name: {(x["document"], x["start"]): x for x in lines} for name, lines in found.items()}
    common = sorted(set.intersection(*(set(r) for r in rows.values())))
    if not common:
        return []
    tokens = np.array([rows[reference][key]["tokens"] for key in common])
    base = np.array([rows[reference][key]["nll"] for key in common])
    table = []
    for name, mine in rows.items():
        nll, agreed = (np.array([mine[key][field] for key in common]) for field in ("nll", "agreed"))
        stacked = np.stack((nll - base, tokens, agreed), 1)
        low, high = bootstrap(stacked, statistic=lambda x: 100 * np.expm1(x[:, 0].sum() / x[:, 1].sum()))
        table.append({
            "scheme": name, "perplexity": float(np.exp(nll.sum() / tokens.sum())), "rows": len(common), "tokens": int(tokens.sum()),
            "change": float(100 * np.expm1((nll - base).sum() / tokens.sum())), "low": low, "high": high,
            "agreement": float(agreed.sum() / tokens.sum()), "agreement_interval": bootstrap(stacked, statistic=lambda x: x[:, 2].sum() / x[:, 1].sum()),
        })  # fmt: skip
    return table


def change(entry: dict[str, Any], reference: str) -> str:
    return "" if entry["scheme"] == reference else f"{entry['change']:+.3f} % ({entry['low']:+.3f} to {entry['high']:+.3f})"


def quality(results: Path) -> list[str] | None:
    table = perplexity_table(results, "cpu", "fp32")
    recall, answers, served = (quality_lines(results, name) for name in ("recall", "generation", "lm_eval"))
    if not table:
        return None
    as_recall = {"fp32": "exact", "fp8": "snapmla"}
    lengths = {name: max(lines, key=lambda line: line["prompts"]) for name, lines in answers.items()}
    rows = []
    for entry in table:
        name = entry["scheme"]
        told = recall.get(as_recall.get(name, name), [])
        right = sum(line["whole"] for line in told)
        codes = f"{right} of {len(told)} ({100 * wilson(right, len(told))[0]:.0f} % or more)" if told else ""
        agreed = "" if name == "fp32" else f"{100 * entry['agreement']:.1f} %"
        answer = f"{np.mean(lengths[name]['lengths']):.1f}" if name in lengths else ""
        if name != "fp32" and name in lengths:
            low, high = bootstrap(np.subtract(lengths[name]["lengths"], lengths["fp32"]["lengths"]))
            answer += f" ({low:+.1f} to {high:+.1f})"
        rows.append((LABEL[name], f"{entry['perplexity']:.3f}", change(entry, "fp32"), agreed, codes, answer))
    farthest = max((line["distance"] for line in recall.get("exact", [])), default=0)
    line = next(iter(quality_lines(results, "perplexity").values()))[-1]
    text = [
        f"{table[0]['rows']} rows of 1,024 held-out tokens, every token computed by decoding through the cache; codes recalled over up to "
        f"{farthest} tokens; answers to {len(lengths['fp32']['lengths']) if lengths else 0} chat prompts, sampled with equal seeds. 95 % intervals, paired "
        f"with FP32. {source(line, 'quality')}.", "",
        *markdown(("cache", "perplexity", "against FP32", "same best token", "codes recalled", "answer length, tokens"), rows),
    ]  # fmt: skip
    if served:
        text += ["", *_served(served)]
    return text


def _served(served: dict[str, list[Line]]) -> list[str]:
    """lm_eval's answers through the server, by cache format."""
    lines = {name: max(found, key=lambda line: line["words"]) for name, found in served.items()}
    base, rows = lines["fp32"], []
    for name, line in lines.items():
        low, high = bootstrap(np.subtract(line["nll"], base["nll"]))
        moved = "" if name == "fp32" else f"{np.mean(line['nll']) - np.mean(base['nll']):+.4f} ({low:+.4f} to {high:+.4f})"
        same = sum(a == b for a, b in zip(line["best"], base["best"]))
        best = f"{sum(line['best'])}" + ("" if name == "fp32" else f", {same} as FP32")
        rows.append(
            (FORMATS[name], f"{np.mean(line['nll']):.4f}", moved, best, f"{sum(line['recalled']):.0f} of {line['recalls']}")
        )
    text = f"Through the server, by `lm_eval` on local tasks: {base['words']} held-out words scored, {base['recalls']} codes generated."
    return [text, "", *markdown(("cache", "nats a word", "against FP32", "best guesses right", "codes recalled"), rows)]


def hopper(results: Path) -> list[str] | None:
    table = perplexity_table(results, "cuda", "bf16")
    if not table:
        return None
    rows = [
        (FORMATS[entry["scheme"]], f"{entry['perplexity']:.3f}", change(entry, "bf16"), "" if entry["scheme"] == "bf16" else f"{100 * entry['agreement']:.1f} %")
        for entry in table
    ]  # fmt: skip
    line = next(iter(quality_lines(results, "perplexity", "cuda").values()))[-1]
    text = f"With the Hopper kernels and BF16 weights, {table[0]['rows']} rows: {source(line, 'quality')}."
    return [text, "", *markdown(("cache", "perplexity", "against BF16", "same best token"), rows)]


# ---- several GPUs


def simulation(results: Path) -> list[str] | None:
    lines = [line for line in read(results / "eight_gpus.jsonl") if line.get("part") == "shapes"]
    lines = newest(lines, "world", "shape", "dp", "tp", "format", "context", "batch")
    if not lines:
        return None
    rows = [
        (
            f"{line['shape']}, DP{line['dp']}/TP{line['tp']}", line["format"].upper(), f"{line['batch']} x {line['context'] >> 10}k",
            f"{line['step_us'] / 1e3:.1f} ms", f"{100 * line['collectives_share']:.1f} %", f"{line['simulated_step_us'] / 1e3:.1f} ms",
            f"{line['experts_us'] / 1e3:.1f} / {line['simulated_experts_us'] / 1e3:.1f} ms",
            f"{100 * line['prediction_error']:+.0f} %",
        )
        for line in lines
    ]  # fmt: skip
    head = (
        "deployment", "cache", "batch", "real step", "collectives alone", "one simulated rank", "experts alone, real / simulated",
        "simulation off by",
    )  # fmt: skip
    return [f"{lines[-1]['world']} GPUs; {source(lines[-1], 'eight_gpus')}.", "", *markdown(head, rows)]


TABLES = {
    "kernel": kernel, "context": context, "quality": quality, "hopper": hopper, "probe": probe, "simulation": simulation,
}  # fmt: skip
