"""Numerical fidelity of the cache formats: `python -m benchmarks.numerics [--quick] [--only values layers context sources]`.

    values   Fig. 3   value ranges and quantization error of the latent and RoPE parts
    layers   Fig. 5   error of attention outputs against exact, layer by layer, for SnapMLA and the schemes of Table 3
    context           the same error against context length, P.V summed in place or folded block by block
    sources           which rounding the error comes from: K, Q, P, the sums

Data: the demo model's own latents and queries on held-out text, and synthetic layers (benchmarks/activations.py). Errors are
of the attention output in latent space, per query token over all heads: RMSE, 1 - cosine, ||x - exact|| / ||exact||; each
line has their mean and standard deviation over query tokens. Appends to results/numerics.jsonl and skips what is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations import OUTLIERS, Attention, demo_layers, synthetic
from benchmarks.records import RESULTS, Records
from benchmarks.schemes import (
    COMPARED,
    EXACT,
    SNAPMLA,
    STEPS,
    Scheme,
    attend,
    logits,
    round_e4m3,
    stored_keys,
    stored_query,
)  # fmt: skip
from benchmarks.tensor_core import p_times_v

PARTS = ("values", "layers", "context", "sources")
METHOD = "simulated rounding of exact FP32 cache contents and queries, FP32 attention on the rounded values"
SEED = 0
FULL, QUICK = 32768, 4096  # context of the layer-wise comparison
LONGEST = 262144
EMULATED_CHANNELS = 64  # of 512: the emulated sums are slow, and channels are independent


def errors(out: torch.Tensor, exact: torch.Tensor) -> dict[str, list[float]]:
    """Mean and standard deviation over query tokens of the three metrics. out, exact: [n, H, C]."""
    x, y = out.double().flatten(1), exact.double().flatten(1)
    difference = (x - y).norm(dim=1)
    metrics = {
        "rmse": difference / x.shape[1] ** 0.5,
        "cosine": 1.0 - torch.nn.functional.cosine_similarity(x, y, dim=1),
        "relative": difference / y.norm(dim=1),
    }
    return {name: [float(value.mean()), float(value.std(correction=0))] for name, value in metrics.items()}


def output(scheme: Scheme, layer: Attention, static_amax: float = 0.0) -> torch.Tensor:
    """Attention output of a layer through a scheme."""
    keys = stored_keys(scheme, layer.content, layer.rope, static_amax)
    return attend(scheme, stored_query(scheme, *layer.query), keys, layer.visible, layer.softmax_scale)


# ---- Fig. 3


def values(layer: Attention) -> dict[str, Any]:
    """Histogram over symmetric logarithmic bins, largest value, and mean squared error of E4M3 with a scale per token."""
    edges = torch.cat((-torch.logspace(3.5, -2, 56), torch.logspace(-2, 3.5, 56)))
    found: dict[str, Any] = {"edges": edges.tolist()}
    bounds = edges.to(layer.content.device)
    for name, x in (("content", layer.content), ("rope", layer.rope)):
        bins = torch.bucketize(x.flatten(), bounds, right=True)  # 0 and len(edges) lie outside
        rounded, _ = round_e4m3(x, x.abs().amax(1, keepdim=True))
        found[name] = {
            "counts": torch.bincount(bins, minlength=len(edges) + 1)[1:-1].tolist(),
            "amax": float(x.abs().max()),
            "std": float(x.std()),
            "mse": float((rounded - x).double().square().mean()),
            "mse_bf16": float((x.bfloat16().float() - x).double().square().mean()),
        }
    return found


# ---- Fig. 5 and Table 3


def fidelity(layer: Attention, static_amax: float) -> Iterator[dict[str, Any]]:
    exact = output(EXACT, layer)
    for scheme in COMPARED:
        yield {"scheme": scheme.name} | errors(output(scheme, layer, static_amax), exact)


# ---- beyond the paper


def accumulation(layer: Attention) -> Iterator[dict[str, Any]]:
    """SnapMLA with emulated tensor-core sums, per block and in place, and with exact sums; of the first channels only.

    `alone`: against the same scheme with exact sums, so it holds the sums' error only. `shrink`: mean of <out, exact> /
    <exact, exact> - 1, the bias toward zero.
    """
    asked, keys = stored_query(SNAPMLA, *layer.query), stored_keys(SNAPMLA, layer.content, layer.rope)
    few = slice(0, EMULATED_CHANNELS)
    exact = output(EXACT, layer)[..., few]
    rounded = {
        p_block: attend(replace(SNAPMLA, p_block=p_block), asked, keys, layer.visible, layer.softmax_scale)[..., few]
        for p_block in (64, 128)
    }
    scores = logits(asked, keys, layer.visible, layer.softmax_scale)
    shown = replace(keys, content=keys.content[:, few])
    yield {"sums": "exact"} | errors(rounded[64], exact)
    for sums, p_block, two_level in (("two-level, 64", 64, True), ("two-level, 128", 128, True), ("single-level", 64, False)):
        out = p_times_v(scores.flatten(0, 1), shown, p_block=p_block, two_level=two_level).view_as(exact)
        shrink = float(((out * exact).sum() / exact.square().sum()) - 1.0)
        yield {"sums": sums, "shrink": shrink, "alone": errors(out, rounded[p_block])["relative"]} | errors(out, exact)


def sources(layer: Attention) -> Iterator[dict[str, Any]]:
    exact = output(EXACT, layer)
    for scheme in (*STEPS, SNAPMLA):
        yield {"source": scheme.name} | errors(output(scheme, layer), exact)
    for line in accumulation(layer):
        if line["sums"] != "exact":
            yield {"source": line["sums"]} | {"relative": line["alone"]}


def contexts(quick: bool) -> list[int]:
    """Lengths of the error against context: to 32k or 256k."""
    return [1024 << i for i in range(6 if quick else 9)]


def measure(records: Records, parts: list[str], quick: bool, device: str) -> None:
    """Everything that is not in the records yet."""

    def add(figure: str, key: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        if figure in parts and not records.has(figure=figure, **key):
            found = list(lines)
            for line in found:
                records.write(figure=figure, **key, **line)
            print(
                figure, key, {k: v for k, v in found[-1].items() if k in ("scheme", "source", "sums", "relative")}, flush=True
            )

    length = QUICK if quick else FULL
    for outlier in OUTLIERS:
        key = {"data": "synthetic", "outlier": outlier, "tokens": length}
        if not all(records.has(figure=part, **key) for part in parts if part in ("values", "layers")):
            layer = synthetic(length, outlier, queries=16, seed=SEED).to(device)
            add("values", key, iter([values(layer)]))
            other = float(synthetic(4096, outlier, seed=SEED + 1).content.abs().max())
            add("layers", key, fidelity(layer, other))
    for mean in (0.0, 0.5):
        key = {"data": "synthetic", "mean": mean, "outlier": 300.0}
        wanted = [tokens for tokens in contexts(quick) if not records.has(figure="context", **key, tokens=tokens)]
        if "context" in parts and wanted:
            # Every context is the beginning of the same one, so that lengths differ in nothing else.
            longest = synthetic(LONGEST, 300.0, mean=mean, heads=4, queries=8, seed=SEED).to(device)
            for tokens in wanted:
                add("context", key | {"tokens": tokens}, accumulation(longest.beginning(tokens, 8)))
        key["tokens"] = length
        if "sources" in parts and not records.has(figure="sources", **key):
            add("sources", key, sources(synthetic(length, 300.0, mean=mean, heads=4, queries=8, seed=SEED).to(device)))

    lengths = [tokens for tokens in contexts(True) if tokens <= length]
    wanted = {"values": [length], "layers": [length], "sources": [length], "context": lengths}
    missing = sorted({
        tokens for part in parts for tokens in wanted[part] if not records.has(figure=part, data="demo", layer=0, tokens=tokens)
    })  # fmt: skip
    if not missing:
        return
    calibration: list[float] = []
    # The model's last positions are kept for the query tokens.
    taken = {min(tokens, 32768 - 17): tokens for tokens in {QUICK // 4, *missing}}
    for at, layers in demo_layers(sorted(taken), device=device):
        if not calibration:  # static scales come from the beginning of the text, as a calibration set would give them
            calibration = [float(layer.content[: QUICK // 4].abs().max()) for layer in layers]
        for index, layer in enumerate(layers):
            key = {"data": "demo", "layer": index, "tokens": taken[at]}
            few = layer.beginning(int(layer.visible[0]) // 128 * 128, 4)  # whole blocks, as the emulation wants
            if taken[at] in wanted["layers"] and taken[at] in missing:
                add("values", key, iter([values(layer)]))
                add("layers", key, fidelity(layer, calibration[index]))
                add("sources", key, sources(few))
            if taken[at] in wanted["context"]:
                add("context", key, accumulation(few))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"context of {QUICK} tokens instead of {FULL}; against context: synthetic to 32768"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "numerics.jsonl")
    args = parser.parse_args()
    with torch.inference_mode():
        measure(Records(args.out, device=args.device, method=METHOD, seed=SEED), args.only, args.quick, args.device)


if __name__ == "__main__":
    main()
