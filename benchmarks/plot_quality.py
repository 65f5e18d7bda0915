"""Tables 1 and 2 in small, on the bundled model. Lines: benchmarks/quality.py."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.figure_style import LABEL, STYLE, Folders, origin
from benchmarks.records import bootstrap, wilson
from benchmarks.tables import perplexity_table, quality_lines

# ---- Tables 1 and 2 in small


def table1(folders: Folders) -> str | None:
    table = perplexity_table(folders.results, "cpu", "fp32")
    recall = quality_lines(folders.results, "recall")
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
    (folders.figures / "table1_quality.md").write_text("\n".join(text) + "\n", encoding="utf-8")

    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 5.4), layout="constrained", width_ratios=(1.25, 1))
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
        mean, (low, high) = 1e4 * np.array([x.mean() for x in losses]), 1e4 * np.array([bootstrap(x) for x in losses]).T
        colour, marker, line = STYLE[name]
        right.errorbar(
            np.arange(len(distances)) + 0.06 * (shift - 2), mean, yerr=(mean - low, high - mean), label=LABEL[name], color=colour,
            marker=marker, linestyle=line, capsize=3,
        )  # fmt: skip
    right.set_ylim(bottom=0)
    right.set_xticks(
        range(len(distances)), [f"{d}\n{sum(x['distance'] == d for x in recall['exact'])} prompts" for d in distances]
    )
    right.set(
        xlabel="distance (tokens)",
        ylabel="loss of the code's digits ($10^{-4}$ nats)",
        title=f"Recall by distance: {sum(whole)} of {len(whole)} codes whole",
    )
    right.legend(fontsize=8, loc="lower left")
    figure.suptitle("Table 1 in small  Quality of the bundled model by cache format")
    folders.save(
        figure,
        "table1_quality",
        f"{table[0]['tokens']} held-out tokens; {origin(next(iter(quality_lines(folders.results, 'perplexity').values())))}",
    )
    return None


def table2(folders: Folders) -> str | None:
    found = {
        name: max(lines, key=lambda x: x["prompts"]) for name, lines in quality_lines(folders.results, "generation").items()
    }
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
    (folders.figures / "table2_lengths.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    return None
