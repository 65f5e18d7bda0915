"""Figures of whole decode steps: what a step is made of, and what the FP8 cache gains. Lines: benchmarks/decode.py."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt

from benchmarks.figure_style import NAMES, Folders, Line, legend_below, origin
from benchmarks.records import newest

PARTS = {  # component: colour, hatch
    "attention": ("#0072B2", ""), "linears": ("#E69F00", "//"), "experts": ("#009E73", ""), "norms": ("#CC79A7", "xx"),
    "collectives": ("#56B4E9", ".."), "sampling": ("#D55E00", ""), "other": ("#BBBBBB", "\\\\"), "no kernel runs": ("#FFFFFF", ""),
}  # fmt: skip


def in_step(line: Line) -> dict[str, float]:
    """Milliseconds of each component's kernels in a step, and of none; components alone where no profile was taken."""
    if "profiled_us" not in line:
        return {name: part["us"] / 1e3 for name, part in line["parts"].items()}
    found = dict.fromkeys(PARTS, 0.0)
    for _, us, _, part in line["kernels"]:
        found[part] += us / 1e3
    found["no kernel runs"] = (line["profiled_us"] - line["busy_us"]) / 1e3
    return found


def decode_step(folders: Folders) -> str | None:
    """Stacked bars of one deployment's steps, the roofline as a mark on each."""
    lines = folders.lines("decode", "decode", shape="deepseek_v3.1", dp=8, tp=1)
    lines = [line for line in newest(lines, "format", "context", "batch", "simulated") if "operations" in line]
    if not lines:
        return "decode.jsonl has no lines of DeepSeek-V3.1 DP8/TP1 (needs a Hopper GPU)"
    lines.sort(key=lambda line: (line["context"], line["batch"], line["format"]))
    figure, axis = plt.subplots(figsize=(max(7.0, 1.0 + 0.8 * len(lines)), 4.8), layout="constrained")
    below = [0.0] * len(lines)
    spent = [in_step(line) for line in lines]
    for part, (colour, hatch) in PARTS.items():
        heights = [found.get(part, 0.0) for found in spent]
        if not any(heights):
            continue
        axis.bar(
            range(len(lines)),
            heights,
            0.7,
            bottom=below,
            color=colour,
            hatch=hatch,
            edgecolor="#333333",
            linewidth=0.5,
            label=part,
        )
        below = [a + b for a, b in zip(below, heights)]
    axis.plot(
        range(len(lines)),
        [line["roofline_us"] / 1e3 for line in lines],
        "k_",
        markersize=28,
        markeredgewidth=2,
    )
    axis.plot([], [], color="black", linewidth=2, label="roofline")
    axis.margins(x=0.02)
    axis.set_xticks(
        range(len(lines)),
        [f"{line['format'].upper()}\n{line['batch']} x {line['context'] >> 10}k" for line in lines],
        fontsize=8,
    )
    axis.set_ylabel("milliseconds a step")
    axis.set_title("A decode step of DeepSeek-V3.1, DP8/TP1, by component" + simulated(lines))
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    folders.save(figure, "decode_step", origin(lines))
    return None


def decode_ratio(folders: Folders) -> str | None:
    """FP8 over BF16 cache against context: attention at equal batch, tokens/s at equal memory, and what rooflines allow."""
    lines = newest(folders.lines("decode", "decode_ratios"), "shape", "dp", "tp", "context", "simulated")
    if not lines:
        return "decode.jsonl has no ratios of cache formats (needs a Hopper GPU)"
    worlds = sorted({(line["shape"], line["dp"], line["tp"]) for line in lines})
    shapes = list(dict.fromkeys(shape for shape, _, _ in worlds))
    columns = max(sum(other == shape for other, _, _ in worlds) for shape in shapes)
    figure, axes = plt.subplots(
        len(shapes), columns, figsize=(max(7.5, 1.0 + 3.6 * columns), 1.2 + 3.2 * len(shapes)), layout="constrained",
        squeeze=False, sharey=True,
    )  # fmt: skip
    for axis in axes.flat:
        axis.set_visible(False)
    places = {world: axes[shapes.index(world[0])][[w for w in worlds if w[0] == world[0]].index(world)] for world in worlds}
    for (shape, dp, tp), axis in places.items():
        axis.set_visible(True)
        mine = sorted(
            (line for line in lines if (line["shape"], line["dp"], line["tp"]) == (shape, dp, tp)),
            key=lambda line: line["context"],
        )
        contexts = [line["context"] for line in mine]
        for name, label, style, colour in (
            ("attention_step_ratio", "attention in the step, equal batch", "s-", "#0072B2"),
            ("attention_ratio", "attention alone, equal batch", "D:", "#56B4E9"),
            ("tokens_ratio", "tokens/s, largest batches of equal memory", "o-", "#009E73"),
            ("roofline_ratio", "the two rooflines, largest batches", "_--", "#000000"),
        ):
            axis.plot(contexts, [line[name] for line in mine], style, color=colour, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [f"{context >> 10}k" for context in contexts])
        axis.set_xlabel("context tokens")
        axis.set_title(f"{NAMES.get(shape, shape)}, DP{dp}/TP{tp}{simulated(mine)}", fontsize=9)
        axis.axhline(1.0, color="#999999", linewidth=0.8)
        axis.grid(axis="y", alpha=0.3)
    for row in axes:
        row[0].set_ylabel("FP8 cache over BF16 cache")
    legend_below(figure, *axes[0, 0].get_legend_handles_labels(), ncols=2)
    figure.suptitle("What the FP8 cache gains")
    folders.save(figure, "decode_ratio", origin(lines))
    return None


def simulated(lines: Sequence[Line]) -> str:
    return "\n(one SIMULATED rank)" if any(line["simulated"] for line in lines) else ""
