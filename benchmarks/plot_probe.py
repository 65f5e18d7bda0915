"""Figure of the live fidelity probe: what it costs, and what it reports. Lines: benchmarks/kernel_figures.py, part `probe`."""

from __future__ import annotations

from statistics import median

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.figure_style import NAMES, Folders, Line, origin
from benchmarks.records import newest

COSTS = (  # field of a line, label, colour, hatch
    ("overhead_writing", "following two sequences, never comparing", "#56B4E9", ""),
    ("overhead", "comparing every layer in 1 % of the steps", "#0072B2", "//"),
)
LIMIT = 2.0  # per cent


def probe(folders: Folders) -> str | None:
    """Overhead by model, with quartiles over turns; beside it the error it finds in each layer."""
    lines = newest((line for line in folders.lines("kernel_figures", "probe") if "overhead_turns" in line), "model")
    if not lines:
        return "kernel_figures.jsonl has no lines of `probe` (needs a Hopper GPU)"
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.4), layout="constrained")
    for index, (field, label, colour, hatch) in enumerate(COSTS):
        at = np.arange(len(lines)) + 0.36 * (index - 0.5)
        low, middle, high = np.array([np.quantile(line[f"{field}_turns"], (0.25, 0.5, 0.75)) for line in lines]).T * 100
        left.bar(
            at, middle, 0.34, yerr=(middle - low, high - middle), capsize=3, color=colour, hatch=hatch, edgecolor="white", label=label, error_kw={"linewidth": 1}
        )  # fmt: skip
        for x, m, top in zip(at, middle, high):
            left.annotate(f"{m:+.2f} %", (x, max(top, 0)), (0, 4), textcoords="offset points", ha="center", fontsize=8)
    left.axhline(LIMIT, color="#D55E00", linestyle="--", linewidth=1.2, label=f"limit of {LIMIT:.0f} %")
    left.axhline(0, color="black", linewidth=0.8)
    left.set_xticks(range(len(lines)), [_name(line) for line in lines], fontsize=9)
    left.set(ylabel="longer decode step (%)", title="Cost: median and quartiles of turns")
    left.margins(y=0.2)
    left.legend(fontsize=8, loc="upper left")
    for line, colour, marker in zip(lines, ("#0072B2", "#E69F00", "#009E73"), "sD^"):
        right.plot(
            range(len(line["fidelity_mean"])),
            line["fidelity_mean"],
            color=colour,
            marker=marker,
            label=_name(line).split("\n")[0],
        )
    right.set_ylim(bottom=0)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="layer", ylabel="relative L2 error of attention", title="Report: mean error of each layer while serving")
    right.grid(axis="y", alpha=0.3)
    right.legend(fontsize=8)
    figure.suptitle("Live fidelity probe")
    folders.save(figure, "probe", f"{lines[-1]['method']}; {origin(lines)}")
    return None


def _name(line: Line) -> str:
    model = "demo model" if line["model"] == "demo" else f"{NAMES[line['model']]}, {line['layers']} layers, one SIMULATED rank"
    return f"{model}\nbatch {line['batch']}, {median(line['ms']['off']):.2f} ms a step"
