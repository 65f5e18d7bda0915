"""Draws every figure from benchmarks/results/*.jsonl, without a GPU: `python -m benchmarks.plots [--only fig5 ...]`.

Each figure goes to benchmarks/figures as PNG and SVG; tables as Markdown. A figure whose lines are missing is left out and
named. Colours are Okabe and Ito's, told apart without colour vision, and every series has its own marker or hatch as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.records import RESULTS, bootstrap, newest, read, wilson
from benchmarks.schemes import COMPARED, STEPS

FIGURES = Path(__file__).parent / "figures"
matplotlib.rcParams["svg.hashsalt"] = "snapmla"  # the same file from the same lines
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
METRICS = (("relative", "relative L2 error"), ("rmse", "RMSE"), ("cosine", "1 $-$ cosine similarity"))


def of(path: str, figure: str, **fixed: Any) -> list[Line]:
    """Lines of a figure in a results file whose fields equal `fixed`."""
    lines = read(RESULTS / f"{path}.jsonl")
    return [line for line in lines if line.get("figure") == figure and all(line.get(k) == v for k, v in fixed.items())]


def longest(lines: Iterable[Line]) -> list[Line]:
    """The lines of the longest context among them."""
    lines = list(lines)
    most = max((line["tokens"] for line in lines), default=0)
    return [line for line in lines if line["tokens"] == most]


def save(figure: Figure, name: str, note: str) -> None:
    """PNG and SVG, with a line on where the numbers come from."""
    figure.text(0.005, 0.004, note, fontsize=6.5, color="#555555", ha="left", va="bottom")
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=130)
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def origin(lines: list[Line]) -> str:
    """Device, versions and revision of the newest line."""
    line = lines[-1]
    clocks = f", {line['sm_mhz']} MHz SM clock" if line.get("sm_mhz") else ""
    return f"{line['device']}{clocks}; torch {line['torch']}; revision {line.get('git', '?')}; {line['date'][:10]}"


def tokens_axis(axis: Axes, ticks: Iterable[int]) -> None:
    """Base-2 axis labelled 1k, 2k, ..."""
    ticks = sorted(set(ticks))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{t // 1024}k" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("context length (tokens)")


# ---- Fig. 3


def fig3() -> str | None:
    demo, synthetic = longest(of("numerics", "values", data="demo")), longest(of("numerics", "values", data="synthetic"))
    if not demo or not synthetic:
        return "numerics.jsonl has no lines of `values`"
    demo, synthetic = newest(demo, "layer"), newest(synthetic, "outlier")
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.4), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.025, 1, 0.975))
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
            axis.stairs(counts / counts.sum(), edges, label=label, color=colour, linestyle=line, linewidth=1.6)
            reach = max(entry[part]["amax"] for entry in lines)
            axis.axvline(reach, color=colour, linestyle=":", linewidth=1)
            side = "right" if part == "content" else "left"
            axis.annotate(
                f"max {reach:.0f}", (reach, 1.0), (-3 if side == "right" else 3, -3), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=colour, fontsize=8, ha=side, va="top", rotation=90,
            )  # fmt: skip
        axis.set_xscale("symlog", linthresh=0.1)
        axis.set_xticks([-1000, -100, -10, -1, 0, 1, 10, 100, 1000])
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
    save(figure, "fig3_values", f"{demo[0]['tokens']} tokens; {origin(demo)}")
    return None


# ---- Fig. 5


def fig5() -> str | None:
    demo, synthetic = longest(of("numerics", "layers", data="demo")), longest(of("numerics", "layers", data="synthetic"))
    if not demo or not synthetic:
        return "numerics.jsonl has no lines of `layers`"
    figure, axes = plt.subplots(2, 3, figsize=(13.5, 8), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.025, 1, 0.975))
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
    save(figure, "fig5_layers", f"{demo[0]['method']}; {origin(demo)}")
    return None


# ---- beyond the paper


def context() -> str | None:
    lines = of("numerics", "context")
    if not lines:
        return "numerics.jsonl has no lines of `context`"
    # fmt: off
    style = {"exact": ("#000000", "", ":"), "two-level, 64": ("#0072B2", "s", "-"), "two-level, 128": ("#56B4E9", "D", "--"), "single-level": ("#D55E00", "^", "-")}
    cases = [("synthetic", "mean", 0.0, "synthetic, latents of mean 0"), ("synthetic", "mean", 0.5, "synthetic, latents of mean 0.5 std"), ("demo", "layer", 0, "demo model, layer 0")]
    # fmt: on
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.4), layout="constrained", sharey="row")
    figure.get_layout_engine().set(rect=(0, 0.025, 1, 0.975))
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
        for sums, colour, marker in (
            ("fp8 kernel", "#009E73", "P"),
            ("bf16 kernel", "#777777", "o"),
            ("one product, fast", "#CC79A7", "v"),
        ):
            found = of("kernel_figures", "context", data=data, **{key: value})
            points = sorted(newest((x for x in found if x["sums"] == sums), "tokens"), key=lambda x: x["tokens"])
            for row, metric in enumerate(("relative", "alone")):
                if points and metric in points[0]:
                    mean, spread = np.array([x[metric] for x in points]).T
                    axes[row, column].errorbar([x["tokens"] for x in points], mean, yerr=spread, label=f"on the chip: {sums}", color=colour, marker=marker, linestyle="-.", capsize=2)  # fmt: skip
        axes[0, column].set_title(title)
        for row in (0, 1):
            axes[row, column].set_yscale("log")
            axes[row, column].grid(axis="y", alpha=0.3)
    axes[0, 0].set_ylabel("relative L2 error, all roundings")
    axes[1, 0].set_ylabel("relative L2 error, sums alone")
    axes[0, 0].legend(fontsize=8)
    axes[1, 0].legend(fontsize=8)
    figure.suptitle(
        "Error against context length: P$\\cdot$V summed in the FP8 tensor core's 13 bits, in place or folded into FP32"
    )
    save(figure, "error_against_context", f"tensor-core sums emulated, 64 channels; {origin(lines)}")
    return None


def sources() -> str | None:
    lines = of("numerics", "sources")
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
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
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
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set(
        xlabel="relative L2 error of the attention output, this rounding alone",
        title="Where the error of FP8 decode attention comes from",
    )
    axis.axhline(4.5, color="#999999", linewidth=0.8)
    axis.axhline(7.5, color="#999999", linewidth=0.8)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.5))
    save(figure, "error_by_source", f"{demo[0]['tokens'] if demo else '?'} tokens; {origin(lines)}")
    return None


# ---- Fig. 6 and 7

FP8_OVER_BF16 = 17 / 9  # Eq. 14: 512 + 512 of a tile's 576 + 512 dimensions run at twice the BF16 rate
FLOP = 2 * (576 + 512)  # a query row and token
TOKEN_BYTES = {"fp8": 644, "bf16": 1152}


def roofline(line: Line) -> tuple[float, float]:
    """(tensor peak, attainable) TFLOP/s of a case, from the matrix product and the page reads measured in the same run."""
    peak = line["bf16_matmul_tflops"] * (FP8_OVER_BF16 if line["format"] == "fp8" else 1.0)
    intensity = line["heads"] * line["query_len"] * FLOP / TOKEN_BYTES[line["format"]]  # FLOP a byte read once
    return peak, min(peak, line["read_rate_tb_per_s"] * intensity)


def fig7() -> str | None:
    lines = of("kernel_figures", "fig7")
    # kernel_decode times the same shapes with the same method.
    lines = [x for x in read(RESULTS / "kernel_decode.jsonl") if x.get("batch") == 32 and x["tokens"] == 32 * x["longest"] and "invariant" not in x["case"]] + lines  # fmt: skip
    lines = newest(lines, "kernel", "format", "heads", "query_len", "longest")
    heads = [h for h in (16, 32, 64, 128) if any(x["heads"] == h for x in lines)]
    if not heads:
        return "kernel_decode.jsonl and kernel_figures.jsonl hold no batch of 32 (needs a Hopper GPU)"
    blues, greys, markers = ["#0072B2", "#56B4E9", "#005080", "#00A0C0"], ["#555555", "#999999", "#333333", "#777777"], "so^D"
    peers = {"flash_mla": ("#D55E00", "v"), "flashinfer": ("#009E73", "P")}
    figure, axes = plt.subplots(1, len(heads), figsize=(3.6 * len(heads), 4.8), layout="constrained", squeeze=False)
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    for axis, count in zip(axes[0], heads):
        mine = [x for x in lines if x["heads"] == count]
        for fmt, colours, name in (("fp8", blues, "SnapMLA FP8"), ("bf16", greys, "our BF16")):
            for query_len in sorted({x["query_len"] for x in mine}):
                points = sorted((x for x in mine if (x["format"], x["query_len"], x["kernel"]) == (fmt, query_len, "ours")), key=lambda x: x["longest"])  # fmt: skip
                if not points:
                    continue
                rate = np.array([x["tflops"] for x in points])
                # Quartiles of the time around its median, as rates.
                ends = np.abs(
                    np.array([[x["us"] / x["us_quartiles"][1], x["us"] / x["us_quartiles"][0]] for x in points]).T * rate - rate
                )
                axis.errorbar(
                    [x["longest"] for x in points], rate, yerr=ends, label=f"{name}, {query_len} query token{'s' * (query_len > 1)}",
                    color=colours[query_len - 1], marker=markers[query_len - 1], linestyle="-" if fmt == "fp8" else "--", markersize=5, capsize=2,
                )  # fmt: skip
            one = next((x for x in mine if x["format"] == fmt and x["query_len"] == 1), None)
            if one is not None:
                style = {"color": colours[0], "linewidth": 1.2, "linestyle": ":" if fmt == "fp8" else "-."}
                axis.axhline(roofline(one)[1], label=f"{'FP8' if fmt == 'fp8' else 'BF16'} roofline, 1 query token", **style)
        for peer, (colour, marker) in peers.items():
            points = sorted((x for x in mine if (x["kernel"], x["query_len"]) == (peer, 1)), key=lambda x: x["longest"])
            if points:
                axis.plot(
                    [x["longest"] for x in points],
                    [x["tflops"] for x in points],
                    color=colour,
                    marker=marker,
                    label=f"{peer} (BF16), 1 query token",
                )
        tokens_axis(axis, [x["longest"] for x in mine])
        axis.set_title(f"{count} heads")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("TFLOP/s (2 x rows x tokens x 1088)")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(
        "Fig. 7  Decode kernel at batch 32: medians and quartiles, beside rooflines from the same run's page reads and BF16 product"
    )
    save(figure, "fig7_kernel", f"{lines[-1]['device']}; torch {lines[-1]['torch']}; {lines[-1]['date'][:10]}")
    return None


def fig6() -> str | None:
    lines = newest(of("kernel_figures", "fig6"), "model", "dp", "format", "kernel", "length")
    if not lines:
        return "kernel_figures.jsonl has no lines of `fig6` (needs a Hopper GPU)"
    models, settings = list(dict.fromkeys(x["model"] for x in lines)), sorted({(x["dp"], x["tp"]) for x in lines})
    figure, axes = plt.subplots(
        len(models), len(settings), figsize=(4.2 * len(settings), 3.6 * len(models)), layout="constrained", squeeze=False
    )
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    for row, model in enumerate(models):
        for column, (dp, tp) in enumerate(settings):
            axis = axes[row, column]
            mine = [x for x in lines if (x["model"], x["dp"], x["kernel"]) == (model, dp, "ours")]
            lengths = sorted({x["length"] for x in mine})
            for offset, fmt, colour, hatch in ((-0.2, "bf16", "#999999", ""), (0.2, "fp8", "#0072B2", "//")):
                points = sorted((x for x in mine if x["format"] == fmt), key=lambda x: x["length"])
                at = np.arange(len(points)) + offset
                bars = axis.bar(
                    at,
                    [x["tflops"] for x in points],
                    0.38,
                    color=colour,
                    hatch=hatch,
                    edgecolor="white",
                    label=f"our {fmt.upper()}" if fmt == "bf16" else "SnapMLA FP8",
                )
                axis.bar_label(bars, fmt="%.0f", fontsize=7)
                axis.plot(
                    at,
                    [roofline(x)[1] for x in points],
                    "_",
                    color="black",
                    markersize=18,
                    label="roofline" if fmt == "fp8" else None,
                )
            batches = {x["length"]: x["batch"] for x in mine}
            axis.set_xticks(range(len(lengths)), [f"{n // 1024}k\nbatch {batches[n]}" for n in lengths])
            axis.set_title(f"{model}, DP{dp}/TP{tp}: {mine[0]['heads']} heads", fontsize=10)
            axis.margins(y=0.15)
        axes[row, 0].set_ylabel("TFLOP/s")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle("Fig. 6  Decode kernel under the shapes of serving, one rank")
    save(figure, "fig6_kernel_serving", f"{lines[0]['method']}; {origin(lines)}")
    return None


# ---- Tables 1 and 2 in small


def _quality(figure: str, on: str = "cpu") -> dict[str, list[Line]]:
    keys = {"perplexity": ("document", "start"), "recall": ("distance", "prompt"), "generation": ("prompts",)}[figure]
    found: dict[str, list[Line]] = {}
    for line in newest(of("quality", figure, on=on), "scheme", *keys):
        found.setdefault(line["scheme"], []).append(line)
    return found


def perplexity_table(on: str, reference: str) -> list[dict[str, Any]]:
    """Perplexity of every scheme over the rows all have, and its ratio to the reference's with a paired interval."""
    found = _quality("perplexity", on)
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


def table1() -> str | None:
    table = perplexity_table("cpu", "fp32")
    recall = _quality("recall")
    if not table or not recall:
        return "quality.jsonl has no lines of `perplexity` and `recall`"
    distances = sorted({x["distance"] for x in recall["exact"]})
    as_recall = {"fp32": "exact", "fp8": "snapmla"}
    text = [
        f"Quality of the bundled model by cache, {table[0]['tokens']} held-out tokens in {table[0]['rows']} rows; 95 % intervals",
        "(paired bootstrap over rows; Wilson for recall). fp32, bf16 and fp8 are the product's caches, the rest is simulated.", "",
        "| cache | perplexity | change against FP32 | same best token | " + " | ".join(f"recall at {d} tokens" for d in distances) + " |",
        "|---|---|---|---|" + "---|" * len(distances),
    ]  # fmt: skip
    for entry in table:
        name = entry["scheme"]
        cells = []
        for distance in distances:
            mine = [x for x in recall.get(as_recall.get(name, name), []) if x["distance"] == distance]
            right = sum(x["whole"] for x in mine)
            low, high = wilson(right, len(mine)) if mine else (0.0, 0.0)
            cells.append(f"{right}/{len(mine)} ({100 * low:.0f} to {100 * high:.0f} %)" if mine else "")
        low, high = entry["agreement_interval"]
        change = "" if name == "fp32" else f"{entry['change']:+.3f} % ({entry['low']:+.3f} to {entry['high']:+.3f})"
        agreement = "" if name == "fp32" else f"{100 * entry['agreement']:.2f} % ({100 * low:.2f} to {100 * high:.2f})"
        text.append(f"| {LABEL[name]} | {entry['perplexity']:.4f} | {change} | {agreement} | " + " | ".join(cells) + " |")
    (FIGURES / "table1_quality.md").write_text("\n".join(text) + "\n", encoding="utf-8")

    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 5.4), layout="constrained", width_ratios=(1.25, 1))
    figure.get_layout_engine().set(rect=(0, 0.035, 1, 0.965))
    shown = [entry for entry in table if entry["scheme"] != "fp32"]
    for index, entry in enumerate(shown):
        colour, marker, _ = STYLE[{"fp8": "snapmla"}.get(entry["scheme"], entry["scheme"])]
        ends = [[entry["change"] - entry["low"]], [entry["high"] - entry["change"]]]
        left.errorbar(entry["change"], index, xerr=ends, color=colour, marker=marker, capsize=3, markersize=7)
    left.axvspan(-0.5, 0.5, color="#0072B2", alpha=0.08, label="within 0.5 %")
    left.axvline(0, color="black", linewidth=0.8)
    left.set_yticks(range(len(shown)), [LABEL[entry["scheme"]] for entry in shown])
    left.invert_yaxis()
    left.set(xlabel="change of held-out perplexity against the FP32 cache (%)", title="Perplexity, 95 % paired intervals")
    left.legend(fontsize=8, loc="lower right")
    whole = [x["whole"] for lines in recall.values() for x in lines]
    for shift, name in enumerate(n for n in ("exact", "bf16", "snapmla", "a", "a_own") if n in recall):
        losses = [np.array([x["nll"] for x in recall[name] if x["distance"] == distance]) for distance in distances]
        mean, (low, high) = np.array([x.mean() for x in losses]), np.array([bootstrap(x) for x in losses]).T
        colour, marker, line = STYLE[name]
        right.errorbar(
            np.arange(len(distances)) + 0.06 * (shift - 2), mean, yerr=(mean - low, high - mean), label=LABEL[name], color=colour,
            marker=marker, linestyle=line, capsize=3,
        )  # fmt: skip
    right.set_yscale("log")
    right.set_xticks(
        range(len(distances)), [f"{d}\n{sum(x['distance'] == d for x in recall['exact'])} prompts" for d in distances]
    )
    right.set(
        xlabel="distance (tokens)",
        ylabel="loss of the code's digits (nats)",
        title=f"Recall by distance: {sum(whole)} of {len(whole)} codes whole",
    )
    right.legend(fontsize=8)
    figure.suptitle("Table 1 in small  Quality of the bundled model by cache format")
    save(
        figure, "table1_quality", f"{table[0]['tokens']} held-out tokens; {origin(next(iter(_quality('perplexity').values())))}"
    )
    return None


def table2() -> str | None:
    found = {name: max(lines, key=lambda x: x["prompts"]) for name, lines in _quality("generation").items()}
    if "fp32" not in found:
        return "quality.jsonl has no lines of `generation`"
    base = np.array(found["fp32"]["lengths"])
    text = [
        f"Answer lengths of the bundled model on {len(base)} chat prompts, sampled with equal seeds (at most 200 tokens); 95 % bootstrap intervals.", "",
        "| cache | mean length | change against FP32 (paired) | ended by itself | greedy answers identical | mean common greedy beginning |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, line in found.items():
        lengths = np.array(line["lengths"])
        low, high = bootstrap(lengths)
        change_low, change_high = bootstrap(lengths - base) if name != "fp32" else (0.0, 0.0)
        change = "" if name == "fp32" else f"{(lengths - base).mean():+.1f} ({change_low:+.1f} to {change_high:+.1f})"
        text.append(
            f"| {LABEL[name]} | {lengths.mean():.1f} ({low:.1f} to {high:.1f}) | {change} | {line['ended']}/{len(lengths)} | "
            f"{line['greedy_identical']}/{len(lengths)} | {np.mean(line['greedy_same']):.1f} of {np.mean(found['fp32']['greedy_lengths']):.1f} |"
        )
    (FIGURES / "table2_lengths.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    return None


DRAWN: dict[str, Callable[[], str | None]] = {
    "fig3": fig3, "fig5": fig5, "context": context, "sources": sources, "fig6": fig6, "fig7": fig7, "table1": table1, "table2": table2,
}  # fmt: skip


def draw(names: Iterable[str]) -> dict[str, str]:
    """Draw figures by name; returns what was left out, with the reason."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    reasons = {name: DRAWN[name]() for name in names}
    return {name: reason for name, reason in reasons.items() if reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(DRAWN), default=list(DRAWN))
    args = parser.parse_args()
    left_out = draw(args.only)
    for name in args.only:
        print(f"{name}: left out, {left_out[name]}" if name in left_out else f"{name}: drawn")


if __name__ == "__main__":
    main()
