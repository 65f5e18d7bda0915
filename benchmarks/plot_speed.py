"""Figures of speed: Fig. 1, 6 and 7. Lines: benchmarks/decode.py, eight_gpus.py, kernel_figures.py, kernel_decode.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figure_style import NAMES, Folders, Line, legend_below, origin, tokens_axis
from benchmarks.records import newest
from benchmarks.tables import batch_of_32, roofline

BLUE, LIGHT_BLUE, GREY = "#0072B2", "#56B4E9", "#777777"

# ---- Fig. 1

SERIES = (  # format, what its batch is, label, colour
    ("bf16", "largest", "BF16 cache, largest batch that fits", GREY),
    ("fp8", "equal", "FP8 cache, the same batch", LIGHT_BLUE),
    ("fp8", "largest", "FP8 cache, largest batch that fits", BLUE),
)


def fig1(folders: Folders) -> str | None:
    lines = folders.lines("decode", "decode") + folders.lines("eight_gpus_decode", "decode")
    lines = [line for line in lines if line["shape"] in ("deepseek_v3.1", "longcat_flash")]
    if not lines:
        return "decode.jsonl has no lines of DeepSeek-V3.1 or LongCat-Flash (needs a Hopper GPU)"
    figure = throughput(lines, "Fig. 1  End-to-end decoding throughput by deployment, FP8 against BF16 latent cache")
    folders.save(figure, "fig1_throughput", f"{lines[-1]['method']}; {origin(lines)}")
    return None


def throughput(lines: Sequence[Line], title: str) -> Figure:
    """tokens/s per GPU over the context, a row a shape, a panel a deployment; what was simulated is hatched and says so."""
    lines = newest(lines, "shape", "dp", "tp", "format", "context", "batch", "simulated")
    shapes = sorted({line["shape"] for line in lines})
    worlds = sorted({(line["dp"], line["tp"]) for line in lines})
    figure, axes = plt.subplots(
        len(shapes), len(worlds), figsize=(max(9.0, 4.9 * len(worlds)), 3.7 * len(shapes) + 1.2), layout="constrained", squeeze=False
    )  # fmt: skip
    for row, shape in enumerate(shapes):
        for axis, (dp, tp) in zip(axes[row], worlds):
            mine = [line for line in lines if (line["shape"], line["dp"], line["tp"]) == (shape, dp, tp)]
            _deployment(axis, mine)
            kinds = {line["simulated"] for line in mine}
            how = {(True,): f"SIMULATED: one rank of {dp * tp}", (False,): f"{dp * tp} GPUs"}.get(
                tuple(kinds), f"{dp * tp} GPUs, and one SIMULATED rank" if kinds else "not measured"
            )
            axis.set_title(
                f"{NAMES.get(shape, shape)}, DP{dp}/TP{tp}\n{how}", fontsize=10, color="#A04000" if True in kinds else "black"
            )
        axes[row, 0].set_ylabel("output tokens/s per GPU")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour) for *_, colour in SERIES]
    labels = [label for *_, label, _ in SERIES]
    if any(line["simulated"] for line in lines):
        handles.append(plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="#444444", hatch="////"))
        labels.append("hatched: one simulated rank, its experts' share, no collectives")
    legend_below(figure, handles, labels, ncols=4 if len(worlds) > 1 else 2)
    figure.suptitle(title)
    return figure


def _deployment(axis: Axes, lines: list[Line]) -> None:
    """Bars of one deployment, grouped by context. Above a bar its ratio to BF16, in it the sequences of a replica."""
    contexts = sorted({line["context"] for line in lines})
    ran = [simulated for simulated in (False, True) if any(line["simulated"] is simulated for line in lines)]
    drawn = [(*series, simulated) for series in SERIES for simulated in ran]
    width = 0.86 / max(1, len(drawn))
    for index, (fmt, kind, _, colour, simulated) in enumerate(drawn):
        for place, context in enumerate(contexts):
            here = [line for line in lines if (line["context"], line["simulated"]) == (context, simulated)]
            line = _of_kind(here, fmt, kind)
            if line is None:
                continue
            at, rate = place + width * (index - (len(drawn) - 1) / 2), line["tokens_per_s_per_gpu"]
            rates = [rate * line["step_us"] / us for us in line.get("window_us", [])] or [rate]
            axis.bar(
                at, rate, width * 0.94, color=colour, edgecolor="white", hatch="////" if simulated else "", linewidth=0.4,
                yerr=[[rate - min(rate, *rates)], [max(rate, *rates) - rate]], error_kw={"linewidth": 0.8, "capsize": 2},
            )  # fmt: skip
            base = _of_kind(here, "bf16", "largest")
            over = f"{rate / base['tokens_per_s_per_gpu']:.2f}x" if base is not None and fmt == "fp8" else f"{rate:.0f}"
            axis.annotate(
                over, (at, max(rate, *rates)), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=6.5,
                rotation=90 if len(ran) > 1 else 0,
            )  # fmt: skip
            box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            axis.annotate(
                f"{line['batch']}",
                (at, 0),
                (0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6.5,
                bbox=box,
            )
    axis.set_xticks(range(len(contexts)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in contexts])
    axis.set_xlabel("context (tokens); in a bar: sequences of a replica", fontsize=8)
    axis.margins(y=0.14 if len(ran) < 2 else 0.22)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _of_kind(lines: list[Line], fmt: str, kind: str) -> Line | None:
    return next((line for line in lines if line["format"] == fmt and kind in line["kind"].split()), None)


# ---- Fig. 6 and 7

PEERS = {"flash_mla": ("#D55E00", "v"), "flashinfer": ("#009E73", "P")}


def fig7(folders: Folders) -> str | None:
    lines = batch_of_32(folders.results)
    heads = [count for count in (16, 32, 64, 128) if any(line["heads"] == count for line in lines)]
    if not heads:
        return "kernel_figures.jsonl and kernel_decode.jsonl hold no batch of 32 (needs a Hopper GPU)"
    measured = {(line["heads"], line["query_len"]) for line in lines}
    rows = [pair for pair in ((1, 2), (3, 4)) if all((count, pair[0]) in measured for count in heads)]
    figure, axes = plt.subplots(
        len(rows), len(heads), figsize=(3.6 * len(heads), 3.5 * len(rows) + 1.4), layout="constrained", squeeze=False, sharey="col"
    )  # fmt: skip
    for row, pair in enumerate(rows):
        for axis, count in zip(axes[row], heads):
            _kernel_panel(axis, [line for line in lines if line["heads"] == count and line["query_len"] in pair], pair)
            axis.set_title(f"{count} heads, {pair[0]} and {pair[1]} query tokens", fontsize=10)
        axes[row, 0].set_ylabel("TFLOP/s (2 x 1088 x rows x tokens)")
    for axis, count in zip(axes[0], heads):  # shared by its column
        shown = [line for line in lines if line["heads"] == count]
        axis.set_ylim(0, 1.06 * max(max(line["tflops"], roofline(line)[1]) for line in shown))
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    legend_below(figure, handles.values(), handles.keys(), ncols=4)
    figure.suptitle("Fig. 7  Decode kernel at batch 32: medians and quartiles, beside rooflines from the same run's ceilings")
    newest_line = lines[-1]
    ceilings = (
        f"paged read {newest_line['read_rate_tb_per_s']:.2f} TB/s, BF16 product {newest_line['bf16_matmul_tflops']:.0f} TFLOP/s"
    )
    folders.save(figure, "fig7_kernel", f"{ceilings}, FP8 peak 17/9 of it; {origin(lines)}")
    return None


def _kernel_panel(axis: Axes, lines: list[Line], pair: tuple[int, int]) -> None:
    """Rates over the context of one head count: each format with the pair's query lengths, and what bounds them."""
    looks = {"fp8": ((LIGHT_BLUE, BLUE), "-", "SnapMLA FP8"), "bf16": (("#AAAAAA", "#555555"), "--", "our BF16")}
    for fmt, (colours, dashes, name) in looks.items():
        for query_len, colour, marker in zip(pair, colours, "sD" if pair[0] == 1 else "^o"):
            points = sorted(
                (line for line in lines if (line["format"], line["query_len"], line["kernel"]) == (fmt, query_len, "ours")),
                key=lambda line: line["longest"],
            )
            if not points:
                continue
            rate = np.array([line["tflops"] for line in points])
            tokens = f"{query_len} query token{'s' * (query_len > 1)}"
            axis.errorbar(
                [line["longest"] for line in points], rate, yerr=_quartiles(points, rate), label=f"{name}, {tokens}",
                color=colour, marker=marker, linestyle=dashes, markersize=5, capsize=2,
            )  # fmt: skip
            axis.axhline(roofline(points[-1])[1], color=colour, linewidth=1.0, linestyle=":" if fmt == "fp8" else "-.")
    for peer, (colour, marker) in PEERS.items():
        points = sorted(
            (line for line in lines if (line["kernel"], line["query_len"]) == (peer, pair[0])), key=lambda line: line["longest"]
        )
        if points:
            at, rates = zip(*((line["longest"], line["tflops"]) for line in points))
            axis.plot(at, rates, color=colour, marker=marker, label=f"{peer} (BF16), {pair[0]} query tokens")
    axis.plot([], [], color="#333333", linewidth=1.0, linestyle=":", label="roofline of the FP8 series in its colour")
    axis.plot([], [], color="#333333", linewidth=1.0, linestyle="-.", label="roofline of the BF16 series in its colour")
    if lines:
        tokens_axis(axis, [line["longest"] for line in lines])
    axis.grid(alpha=0.3)


def _quartiles(lines: Sequence[Line], rates: np.ndarray) -> np.ndarray:
    """Distances [2, n] of the quartiles from the medians, as rates; lines rebuilt from a run's printed output have none."""
    ends = [line.get("us_quartiles", (line["us"], line["us"])) for line in lines]
    return np.abs(np.array([(line["us"] / high, line["us"] / low) for line, (low, high) in zip(lines, ends)]).T * rates - rates)


def fig6(folders: Folders) -> str | None:
    lines = newest(folders.lines("kernel_figures", "fig6"), "model", "dp", "format", "kernel", "length")
    if not lines:
        return "kernel_figures.jsonl has no lines of `fig6` (needs a Hopper GPU)"
    models, settings = list(dict.fromkeys(x["model"] for x in lines)), sorted({(x["dp"], x["tp"]) for x in lines})
    figure, axes = plt.subplots(
        len(models), len(settings), figsize=(4.2 * len(settings), 3.6 * len(models) + 0.6), layout="constrained", squeeze=False
    )
    for row, model in enumerate(models):
        for axis, (dp, tp) in zip(axes[row], settings):
            _serving_panel(axis, [line for line in lines if (line["model"], line["dp"]) == (model, dp)])
            heads = next((line["heads"] for line in lines if (line["model"], line["dp"]) == (model, dp)), 0)
            axis.set_title(f"{model}, DP{dp}/TP{tp}: {heads} heads a rank", fontsize=10)
        axes[row, 0].set_ylabel("TFLOP/s (2 x 1088 x heads x tokens)")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    legend_below(figure, handles.values(), handles.keys(), ncols=5)
    figure.suptitle("Fig. 6  Decode kernel under the shapes of serving, one rank, one query token: medians and quartiles")
    folders.save(figure, "fig6_kernel_serving", f"{lines[0]['method']}; {origin(lines)}")
    return None


def _serving_panel(axis: Axes, lines: list[Line]) -> None:
    """Bars of one deployment by context, the roofline of each as a dash."""
    lengths = sorted({line["length"] for line in lines})
    batches = {line["length"]: line["batch"] for line in lines}
    for offset, fmt, colour, hatch, name in (
        (-0.2, "bf16", "#999999", "", "our BF16"),
        (0.2, "fp8", BLUE, "//", "SnapMLA FP8"),
    ):
        points = [line for line in lines if (line["format"], line["kernel"]) == (fmt, "ours")]
        at = [lengths.index(line["length"]) + offset for line in points]
        rates = np.array([x["tflops"] for x in points])
        axis.bar(
            at, rates, 0.38, yerr=_quartiles(points, rates), color=colour, hatch=hatch, edgecolor="white", label=name,
            error_kw={"linewidth": 0.8, "capsize": 2},
        )  # fmt: skip
        slower = {line["length"]: line["tflops"] for line in lines if (line["format"], line["kernel"]) == ("bf16", "ours")}
        for x, line in zip(at, points):
            over = line["tflops"] / slower.get(line["length"], float("nan"))
            told = f"{line['tflops']:.0f}" + (f"\n{over:.2f}x" if fmt == "fp8" and over == over else "")
            axis.annotate(told, (x, line["tflops"]), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=7)
        axis.plot(at, [roofline(line)[1] for line in points], "_", color="black", markersize=18, label="roofline")
    for peer, (colour, marker) in PEERS.items():
        points = [line for line in lines if line["kernel"] == peer]
        if points:
            at = [lengths.index(line["length"]) - 0.2 for line in points]
            axis.plot(at, [line["tflops"] for line in points], marker, color=colour, label=f"{peer} (BF16)")
    axis.set_xticks(range(len(lengths)), [f"{n // 1024}k\nbatch {batches[n]}" for n in lengths])
    axis.set_xlabel("context (tokens) and sequences", fontsize=8)
    axis.margins(y=0.15)
