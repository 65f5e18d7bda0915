"""Figures of numerical fidelity: Fig. 3 and 5, error against context length, error by source. Lines: benchmarks/numerics.py."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.figure_style import LABEL, STYLE, Folders, legend_below, longest, origin, tokens_axis
from benchmarks.records import newest
from benchmarks.schemes import COMPARED

METRICS = (("relative", "relative L2 error"), ("rmse", "RMSE"), ("cosine", "1 $-$ cosine similarity"))

# ---- Fig. 3


def fig3(folders: Folders) -> str | None:
    demo, synthetic = (
        longest(folders.lines("numerics", "values", data="demo")),
        longest(folders.lines("numerics", "values", data="synthetic")),
    )
    if not demo or not synthetic:
        return "numerics.jsonl has no lines of `values`"
    demo, synthetic = newest(demo, "layer"), newest(synthetic, "outlier")
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.4), layout="constrained")
    for row, (lines, title) in enumerate(
        ((demo, "demo model, all layers"), (synthetic[-1:], "synthetic, RoPE channels up to $10^3$"))
    ):
        axis = axes[row, 0]
        for part, label, colour, line in (
            ("content", "latent (content)", "#0072B2", "-"),
            ("rope", "RoPE part", "#D55E00", "--"),
        ):
            counts = np.sum([entry[part]["counts"] for entry in lines], axis=0)
            edges = np.array(lines[0]["edges"])
            reach = max(entry[part]["amax"] for entry in lines)
            label = f"{label}, largest {reach:.0f}"
            axis.stairs(counts / counts.sum(), edges, label=label, color=colour, linestyle=line, linewidth=1.6)
            axis.axvline(reach, color=colour, linestyle=":", linewidth=1)
        axis.set_xscale("symlog", linthresh=0.1)
        axis.set_xticks([-1000, -100, -10, -1, 0, 1, 10, 100, 1000])
        axis.tick_params(axis="x", labelsize=8)
        axis.set_yscale("log")
        axis.set(title=f"Values: {title}", xlabel="value (symmetric logarithmic scale)", ylabel="share of values per bin")
        axis.legend(loc="lower center", fontsize=8)
    for axis, lines, names, label in (
        (axes[0, 1], demo, [str(line.get("layer")) for line in demo], "layer of the demo model"),
        (axes[1, 1], synthetic, [f"{line['outlier']:.0f}" for line in synthetic], "largest RoPE channel (synthetic)"),
    ):
        at = np.arange(len(lines))
        for offset, part, text, colour, hatch in (
            (-0.2, "content", "latent", "#0072B2", ""),
            (0.2, "rope", "RoPE part", "#D55E00", "//"),
        ):
            bars = axis.bar(
                at + offset,
                [line[part]["mse"] for line in lines],
                0.38,
                label=f"{text}, E4M3",
                color=colour,
                hatch=hatch,
                edgecolor="white",
            )
            axis.bar_label(bars, fmt="%.0e", fontsize=6.5)
        axis.plot(at + 0.2, [line["rope"]["mse_bf16"] for line in lines], "k_", markersize=14, label="RoPE part, BF16")
        axis.set_yscale("log")
        axis.set_ylim(top=axis.get_ylim()[1] * 30)
        axis.set_xticks(at, names)
        axis.set(title="Mean squared error of rounding, one scale a token", xlabel=label, ylabel="mean squared error")
        axis.legend(fontsize=8, ncols=3, loc="upper left")
    figure.suptitle("Fig. 3  Value ranges and quantization error of the two parts of the latent cache")
    folders.save(figure, "fig3_values", f"{demo[0]['tokens']} tokens; {origin(demo)}")
    return None


# ---- Fig. 5


def fig5(folders: Folders) -> str | None:
    demo, synthetic = (
        longest(folders.lines("numerics", "layers", data="demo")),
        longest(folders.lines("numerics", "layers", data="synthetic")),
    )
    if not demo or not synthetic:
        return "numerics.jsonl has no lines of `layers`"
    figure, axes = plt.subplots(2, 3, figsize=(13.5, 8), layout="constrained")
    for row, (lines, key, label) in enumerate(
        ((demo, "layer", "layer of the demo model"), (synthetic, "outlier", "largest RoPE channel"))
    ):
        for column, (metric, title) in enumerate(METRICS):
            axis = axes[row, column]
            for shift, scheme in enumerate(COMPARED):
                mine = sorted(newest((x for x in lines if x["scheme"] == scheme.name), key), key=lambda x: x[key])
                colour, marker, line = STYLE[scheme.name]
                at = np.arange(len(mine)) + 0.05 * (shift - 4)
                mean, spread = np.array([x[metric] for x in mine]).T
                axis.errorbar(
                    at, mean, yerr=spread, label=scheme.label, color=colour, marker=marker, linestyle=line, markersize=5,
                    linewidth=2.2 if scheme.name == "snapmla" else 1.2, elinewidth=0.6, capsize=1.5, zorder=9 if scheme.name == "snapmla" else 3,
                )  # fmt: skip
            axis.set_yscale("log")
            names = [f"{x[key]:.0f}" for x in mine]
            axis.set_xticks(range(len(names)), names)
            axis.set(xlabel=label, ylabel=title)
            axis.grid(axis="y", alpha=0.3)
        axes[row, 0].set_title(f"{('demo model', 'synthetic')[row]}, context {lines[0]['tokens']} tokens", loc="left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9, title="cache and operands")
    figure.suptitle(
        "Fig. 5  Error of attention outputs against exact attention (mean and standard deviation over query tokens)"
    )
    folders.save(figure, "fig5_layers", f"{demo[0]['method']}; {origin(demo)}")
    return None


# ---- beyond the paper


def context(folders: Folders) -> str | None:
    lines = folders.lines("numerics", "context")
    if not lines:
        return "numerics.jsonl has no lines of `context`"
    # fmt: off
    style = {"exact": ("#000000", "", ":"), "two-level, 64": ("#0072B2", "s", "-"), "two-level, 128": ("#56B4E9", "D", "--"), "single-level": ("#D55E00", "^", "-")}
    cases = [("synthetic", "mean", 0.0, "synthetic, latents of mean 0"), ("synthetic", "mean", 0.5, "synthetic, latents of mean 0.5 std"), ("demo", "layer", 0, "demo model, layer 0")]
    # fmt: on
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.4), layout="constrained", sharey="row")
    for column, (data, key, value, title) in enumerate(cases):
        mine = newest((x for x in lines if x["data"] == data and x[key] == value), "tokens", "sums")
        for sums, (colour, marker, line) in style.items():
            points = sorted((x for x in mine if x["sums"] == sums), key=lambda x: x["tokens"])
            at = [x["tokens"] for x in points]
            for row, metric in enumerate(("relative", "alone")):
                if points and metric in points[0]:
                    mean, spread = np.array([x[metric] for x in points]).T
                    label = "exact sums" if sums == "exact" else LABEL[sums]
                    axes[row, column].errorbar(at, mean, yerr=spread, label=label, color=colour, marker=marker, linestyle=line, markersize=5, capsize=2, elinewidth=0.7)  # fmt: skip
                    tokens_axis(axes[row, column], at)
        for sums, label, colour, marker in (
            ("fp8 kernel", "FP8 kernel, folded every 128 tokens", "#009E73", "P"),
            ("bf16 kernel", "BF16 kernel", "#777777", "o"),
            ("one product, fast", "one FP8 product, in place", "#CC79A7", "v"),
        ):
            found = folders.lines("kernel_figures", "context", data=data, **{key: value})
            points = sorted(newest((x for x in found if x["sums"] == sums), "tokens"), key=lambda x: x["tokens"])
            for row, metric in enumerate(("relative", "alone")):
                if points and metric in points[0]:
                    mean, spread = np.array([x[metric] for x in points]).T
                    axes[row, column].errorbar([x["tokens"] for x in points], mean, yerr=spread, label=f"on the chip: {label}", color=colour, marker=marker, linestyle="-.", capsize=2)  # fmt: skip
        axes[0, column].set_title(title)
        for row in (0, 1):
            axes[row, column].set_yscale("log")
            axes[row, column].grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel("relative L2 error, all roundings")
    axes[1, 0].set_ylabel("relative L2 error, sums alone")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    legend_below(figure, handles.values(), handles.keys(), ncols=4)
    figure.suptitle(
        "Error against context length: P$\\cdot$V summed in the FP8 tensor core's 13 bits, in place or folded into FP32"
    )
    folders.save(
        figure,
        "error_against_context",
        f"sums of the tensor core emulated, 64 channels; outputs of the chip are BF16, whose own rounding is 0.0017; {origin(lines)}",
    )
    return None


def sources(folders: Folders) -> str | None:
    lines = folders.lines("numerics", "sources")
    if not lines:
        return "numerics.jsonl has no lines of `sources`"
    order = ["k_content", "k_rope", "query", "p", "p128", "two-level, 64", "two-level, 128", "single-level", "snapmla"]
    demo = newest(longest(x for x in lines if x["data"] == "demo"), "layer", "source")
    synthetic = newest(longest(x for x in lines if x["data"] == "synthetic"), "mean", "source")
    cases = [
        (f"demo model, layer {layer}", [x for x in demo if x["layer"] == layer]) for layer in sorted({x["layer"] for x in demo})
    ]
    cases += [
        (f"synthetic, mean {mean}", [x for x in synthetic if x["mean"] == mean])
        for mean in sorted({x["mean"] for x in synthetic})
    ]
    colours = ["#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7"]
    hatches = ["", "//", "\\\\", "xx", "..", "++"]
    figure, axis = plt.subplots(figsize=(10.5, 6.5), layout="constrained")
    height = 0.8 / len(cases)
    for index, (label, mine) in enumerate(cases):
        found = {x["source"]: x["relative"] for x in mine}
        at = np.arange(len(order)) + height * (index - (len(cases) - 1) / 2)
        mean, spread = np.array([found[name] for name in order]).T
        axis.barh(
            at, mean, height, xerr=spread, label=label, color=colours[index % 6], hatch=hatches[index % 6], edgecolor="white",
            error_kw={"linewidth": 0.6},
        )  # fmt: skip
    names = [LABEL[name] for name in order[:-1]] + ["all of SnapMLA, exact sums"]
    axis.set_yticks(range(len(order)), names)
    axis.set_ylim(len(order) - 0.4, -0.6)
    axis.set_xscale("log")
    axis.set(
        xlabel="relative L2 error of the attention output, this rounding alone",
        title="Where the error of FP8 decode attention comes from",
    )
    axis.axhline(4.5, color="#999999", linewidth=0.8)
    axis.axhline(7.5, color="#999999", linewidth=0.8)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.5))
    folders.save(figure, "error_by_source", f"{demo[0]['tokens'] if demo else '?'} tokens; {origin(lines)}")
    return None
