"""What all figures share: where lines come from and pictures go, colours, labels, axes.

Colours are Okabe and Ito's, told apart without colour vision, and every series has its own marker, hatch or line as well.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.records import RESULTS, read, revisions
from benchmarks.schemes import COMPARED, STEPS

matplotlib.rcParams["svg.hashsalt"] = "snapmla"  # the same file from the same lines
NOTE_INCHES = 0.3  # height of the two lines on where a figure's numbers come from
NAMES = {"deepseek_v3.1": "DeepSeek-V3.1", "longcat_flash": "LongCat-Flash", "kimi_k2": "Kimi-K2"}  # shapes, as published
Line = dict[str, Any]

# fmt: off
STYLE = {  # scheme: colour, marker, line
    "exact": ("#000000", "", "-"), "bf16": ("#777777", "o", "--"), "snapmla": ("#0072B2", "s", "-"), "a": ("#D55E00", "^", "-"),
    "a_own": ("#E69F00", "v", "--"), "b": ("#009E73", "D", "-."), "c": ("#CC79A7", "P", "-."), "d": ("#56B4E9", "X", ":"),
    "channel": ("#8C6D31", "<", ":"), "tile": ("#5B3A8C", ">", ":"),
}
# fmt: on
LABEL = {scheme.name: scheme.label for scheme in COMPARED} | {
    "fp32": "FP32 cache",
    "bf16": "BF16",
    "fp8": "SnapMLA (FP8 cache)",
    "exact": "exact (FP32)",
    **{step.name: step.label for step in STEPS},
    "two-level, 64": "sums: folded every 64 tokens",
    "two-level, 128": "sums: folded every 128 tokens",
    "single-level": "sums: in place",
}  # fmt: skip


@dataclass(frozen=True)
class Folders:
    """Where results files lie and figures go."""

    results: Path = RESULTS
    figures: Path = RESULTS.parent / "figures"

    def lines(self, name: str, figure: str | None = None, **fixed: Any) -> list[Line]:
        """Lines of a results file, of one figure if named, whose fields equal `fixed`."""
        wanted = fixed if figure is None else fixed | {"figure": figure}
        return [line for line in read(self.results / f"{name}.jsonl") if all(line.get(k) == v for k, v in wanted.items())]

    def save(self, figure: Figure, name: str, note: str) -> None:
        """PNG and SVG, with a line on where the numbers come from."""
        note = textwrap.fill(note, int(19 * figure.get_figwidth()))
        figure.text(0.005, 0.004, note, fontsize=6.5, color="#555555", ha="left", va="bottom")
        if figure.get_layout_engine().get()["rect"] == (0, 0, 1, 1):  # no legend has its place below
            leave_below(figure, NOTE_INCHES)
        self.figures.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.figures / f"{name}.png", dpi=130)
        figure.savefig(self.figures / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def leave_below(figure: Figure, inches: float) -> None:
    """Keep the axes off the lowest part of a figure."""
    share = inches / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))


def legend_below(figure: Figure, handles: Iterable[Any], labels: Iterable[str], ncols: int) -> None:
    """One legend for all axes, between them and the note."""
    labels = list(labels)
    figure.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=(0.5, NOTE_INCHES / figure.get_figheight()),
        ncols=ncols,
        fontsize=8.5,
    )
    leave_below(figure, NOTE_INCHES + 0.2 + 0.19 * -(-len(labels) // ncols))


def longest(lines: Iterable[Line]) -> list[Line]:
    """The lines of the longest context among them."""
    lines = list(lines)
    most = max((line["tokens"] for line in lines), default=0)
    return [line for line in lines if line["tokens"] == most]


def origin(lines: list[Line]) -> str:
    """Device and versions of the newest line, revisions of all."""
    line = lines[-1]
    clocks = f", {line['sm_mhz']} MHz SM clock" if line.get("sm_mhz") else ""
    return f"{line['device']}{clocks}; torch {line['torch']}; {revisions(lines)}; {line['date'][:10]}"


def tokens_axis(axis: Axes, ticks: Iterable[int]) -> None:
    """Base-2 axis labelled 1k, 2k, ..."""
    ticks = sorted(set(ticks))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{t // 1024}k" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("context length (tokens)")
