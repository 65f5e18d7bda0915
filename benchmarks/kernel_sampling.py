"""The choice of tokens on one GPU: `python -m benchmarks.kernel_sampling`.

Times ops.choose_tokens for greedy and drawn rows with each filter beside the same choice as separate torch operations (the
reference backend on the device, launched from Python), and says whether both chose the same tokens. Appends one JSON line a
case to results/kernel_sampling.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, Log, eager, steady
from kernels import ops
from kernels.layout import Draws, Filters

SIZES = ((1, 2048), (64, 2048), (1, 129280), (16, 129280), (64, 129280))
KINDS = {  # min_p, top_k, top_p; None: not there
    "temperature 1": (None, None, None),
    "min_p 0.05": (0.05, None, None),
    "top_k 40": (None, 40, None),
    "top_p 0.9": (None, None, 0.9),
    "all three": (0.001, 200, 0.95),
}


def draws_of(lines: int, vocab: int, min_p: float | None, top_k: int | None, top_p: float | None) -> Draws:
    """Every row drawn at temperature 1, all with one filter."""
    rows, filters = torch.arange(lines, device="cuda"), None
    if (min_p, top_k, top_p) != (None, None, None):
        full = {"size": (lines,), "device": "cuda"}
        filters = Filters(
            rows,
            torch.full(fill_value=min_p or 0.0, **full),
            torch.full(fill_value=top_k or vocab, **full),
            torch.full(fill_value=math.inf if top_p is None else top_p, dtype=torch.float64, **full),
            max_top_k=top_k or 0,
            open_top_p=top_p is not None and top_k is None,
        )
    return Draws(rows, torch.ones(lines, device="cuda"), torch.randint(2**62, (lines,), device="cuda"), filters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "kernel_sampling.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    log = Log(args.output)
    for lines, vocab in SIZES:
        logits, positions = torch.randn(lines, vocab, device="cuda") * 3, torch.arange(lines, device="cuda")
        for kind, filters in {"greedy": None, **KINDS}.items():
            draws = None if filters is None else draws_of(lines, vocab, *filters)
            choose = functools.partial(ops.choose_tokens, logits, positions, draws)
            us = steady([choose] * 8).us
            with ops.backend("reference"):
                torch_us, equal = eager([choose] * 3), choose()
            same = int((choose() == equal).sum())
            log.write(case=kind, rows=lines, vocab=vocab, us=us, torch_us=torch_us, same_tokens=same)
            print(
                f"{lines:>3} x {vocab:<7} {kind:<14} {us:7.1f} us   torch steps {torch_us:8.1f} us   same {same}/{lines}",
                flush=True,
            )


if __name__ == "__main__":
    main()
