"""Tables on speculation, from results/mtp.jsonl; benchmarks/readme_tables.py writes them to the pages.

mtp_speed       tokens per second against k = 0, by temperature, way of accepting, depth and batch
mtp_acceptance  accepted drafts by position on held-out text
mtp_equality    200 requests with every feature on against the plain path
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import newest, read
from benchmarks.tables import markdown, source

Line = dict[str, Any]


def _lines(results: Path, part: str, *keys: str, **fixed: Any) -> list[Line]:
    lines = [line for line in read(results / "mtp.jsonl") if line.get("part") == part]
    lines = [line for line in lines if all(line.get(name) == value for name, value in fixed.items())]
    return newest([line | {"adaptive": line.get("adaptive", False)} for line in lines], *keys)


def _positions(line: Line) -> str:
    return " ".join(f"{part:.2f}" for part in line["accepted_per_pos"])


def _depth(line: Line) -> str:
    return f"{line['depth']}, adaptive" if line["adaptive"] else str(line["depth"])


def _rate(line: Line) -> str:
    """Tokens per second, how many times those of k = 0 in the same run, if that was measured, and where depth is adaptive the
    part of the steps that had drafts."""
    times = f" ({line['speed_up']:.2f}x)" if line["speed_up"] is not None else ""
    return f"{line['tokens_per_s']:.0f}{times}" + (f", drafts {line['drafted']:.2f}" if line["adaptive"] else "")


def _order(line: Line) -> tuple[Any, ...]:
    return line["temperature"], line["acceptance"], line["adaptive"], line["depth"]


def speed(results: Path) -> list[str] | None:
    """One row a temperature, acceptance and depth; batches side by side."""
    cases = _lines(results, "speed", "acceptance", "temperature", "batch", "depth", "adaptive", where="cuda")
    if not cases:
        return None
    batches = sorted({line["batch"] for line in cases})
    rows: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in sorted(cases, key=_order):
        rows.setdefault(_order(line), {})[line["batch"]] = line
    cells: list[Sequence[object]] = []
    for by_batch in rows.values():
        line = by_batch[max(by_batch)]
        figures = [_rate(by_batch[batch]) if batch in by_batch else "" for batch in batches]
        how = line["acceptance"] if line["depth"] else ""
        cells.append((line["temperature"], how, _depth(line), *figures, _positions(line), f"{line['tokens_per_step']:.2f}"))
    head = (
        "temperature",
        "acceptance",
        "k",
        *(f"batch {batch}: tokens/s" for batch in batches),
        "accepted by position",
        "tokens a step",
    )
    return [f"{source(cases[-1], 'mtp')}; the last two columns are those of the largest batch.", "", *markdown(head, cells)]


def acceptance(results: Path) -> list[str] | None:
    """Exact beside ratio acceptance."""
    cases = _lines(results, "acceptance", "acceptance", "temperature", "depth")
    if not cases:
        return None
    found = {(line["temperature"], line["depth"], line["acceptance"]): line for line in cases}
    rows = []
    for temperature, depth in sorted({key[:2] for key in found}):
        pair = [found.get((temperature, depth, how)) for how in ("exact", "ratio")]
        cells = [f"{_positions(line)} ({line['tokens_per_step']:.2f})" if line else "" for line in pair]
        rows.append((temperature, depth, *cells))
    head = ("temperature", "k", "exact: by position (tokens a step)", "ratio: by position (tokens a step)")
    return [f"{source(cases[-1], 'mtp')}; {cases[-1]['prompts']} prompts.", "", *markdown(head, rows)]


def equality(results: Path) -> list[str] | None:
    keys = ("model", "where", "exact", "depth", "asynchronous", "cuda_graphs", "drafts")
    lines = [
        line | {"cuda_graphs": line.get("cuda_graphs"), "drafts": line.get("drafts", "head")}
        for line in _lines(results, "equality", "date", *keys[:5])
    ]
    cases = newest(lines, *keys)
    if not cases:
        return None
    rows: dict[tuple[str, ...], list[Line]] = {}
    for line in cases:
        how = "FP32, exact cache" if line["exact"] else "BF16, graphs" if line["cuda_graphs"] else "BF16, eager"
        where = {"cuda": "H200", "cpu": "CPU"}[line["where"]]
        drafts = "oracle's" if line["drafts"] == "oracle" else "own"
        rows.setdefault((line["model"], where, how, drafts), []).append(line)
    cells: list[Sequence[object]] = []
    for key, group in rows.items():
        equal = sum(line.get("tokens_equal", 0) for line in group)
        total = sum(line["tokens"] for line in group)
        share = [line["accepted_per_pos"][0] for line in group if line["accepted_per_pos"]]
        verdict = (
            "**differs**"
            if any("failed" in line for line in group)
            else "all"
            if equal == total
            else f"{equal} until a near-tie"
        )
        depths = ", ".join(str(depth) for depth in sorted({line["depth"] for line in group}))
        cells.append((*key, depths, group[0]["prompts"], total, verdict, f"{max(share):.2f}" if share else ""))
    head = ("model", "on", "precision", "drafts", "k", "requests", "tokens compared", "equal", "first drafts accepted")
    return markdown(head, cells)


TABLES: dict[str, Callable[[Path], list[str] | None]] = {
    "mtp_speed": speed,
    "mtp_acceptance": acceptance,
    "mtp_equality": equality,
}
