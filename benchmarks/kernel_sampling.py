"""The choice of tokens on one GPU: `python -m benchmarks.kernel_sampling`.

Times ops.choose_tokens for greedy and drawn rows, with each filter, with penalties and with drafts under ratio acceptance,
beside the same choice as separate torch operations (the reference backend on the device, launched from Python), and says
whether both chose the same tokens. Appends one JSON line a case to results/kernel_sampling.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, Log, eager, steady
from kernels import ops
from kernels.layout import Drafts, SamplingTable

SIZES = ((1, 2048), (64, 2048), (1, 129280), (16, 129280), (64, 129280))
QUERY_LEN = 4  # of lines that verify drafts
KINDS = {  # min_p, top_k, top_p; None: not there
    "temperature 1": (None, None, None),
    "min_p 0.05": (0.05, None, None),
    "top_k 40": (None, 40, None),
    "top_p 0.9": (None, None, 0.9),
    "all three": (0.001, 200, 0.95),
}


def table_of(lines: int, vocab: int, min_p: float | None, top_k: int | None, top_p: float | None) -> SamplingTable:
    """Every row drawn at temperature 1, all with one filter."""
    table = SamplingTable.allocate(lines, vocab, "cuda")
    table.temperature.fill_(1.0)
    table.seeds.random_(2**62)
    table.min_p.fill_(min_p or 0.0)
    table.top_k.fill_(top_k or vocab)
    table.top_p.fill_(math.inf if top_p is None else top_p)
    return table


def cases(lines: int, vocab: int) -> Iterator[tuple[str, SamplingTable, Drafts | None]]:
    """What is timed: each filter alone and together, penalties, and drafts accepted by ratio."""
    yield "greedy", SamplingTable.allocate(lines, vocab, "cuda"), None
    for kind, filters in KINDS.items():
        yield kind, table_of(lines, vocab, *filters), None
    penalized = table_of(lines, vocab, None, None, None)
    penalized.frequency.fill_(0.5)
    yield "penalty", penalized, None
    if lines % QUERY_LEN == 0:
        rows = lines // QUERY_LEN
        tokens = torch.randint(vocab, (rows, QUERY_LEN - 1), device="cuda")
        probs = torch.rand(lines, QUERY_LEN - 1, vocab, device="cuda") * 2 / vocab
        counts = torch.full((rows,), QUERY_LEN - 1, device="cuda")
        yield "ratio, all rejected", table_of(lines, vocab, None, None, None), Drafts(tokens, counts, probs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "kernel_sampling.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    log = Log(args.output)
    for lines, vocab in SIZES:
        logits, positions = torch.randn(lines, vocab, device="cuda") * 3, torch.arange(lines, device="cuda")
        rows = torch.arange(lines, device="cuda")
        for kind, table, drafts in cases(lines, vocab):
            choose = functools.partial(ops.choose_tokens, logits, positions, rows, table, drafts)
            us = steady([choose] * 8).us
            with ops.backend("reference"):
                torch_us, equal = eager([choose] * 3), choose()
            same = int((choose() == equal).sum())
            log.write(case=kind, rows=lines, vocab=vocab, us=us, torch_us=torch_us, same_tokens=same)
            print(
                f"{lines:>3} x {vocab:<7} {kind:<20} {us:7.1f} us   torch steps {torch_us:8.1f} us   same {same}/{lines}",
                flush=True,
            )


if __name__ == "__main__":
    main()
