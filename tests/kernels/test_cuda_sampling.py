"""The choice of tokens on Hopper against the reference, to the token."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import ops
from kernels.errors import KernelContractError
from kernels.layout import Draws, Filters
from tests.kernels.poison import poison_free_memory

pytestmark = pytest.mark.hopper

# min_p, top_k, top_p; None: not there
KINDS = {
    "none": (None, None, None),
    "min_p": (0.05, None, None),
    "top_k": (None, 40, None),
    "top_p": (None, None, 0.9),
    "all": (0.001, 200, 0.95),
    "narrow": (None, 1, 0.0),
    "wide": (None, 100_000, 0.999999),
}


def draws_of(rows: list[int], kinds: list[str], vocab: int, temperature: float | None = None) -> Draws:
    """Draws of `rows`, each with its kind of filter."""
    entries = []
    for i, kind in enumerate(kinds):
        min_p, top_k, top_p = KINDS[kind]
        if kind != "none":
            entries.append((i, min_p or 0.0, min(top_k or vocab, vocab), math.inf if top_p is None else top_p))
    filters = None
    if entries:
        lines, min_ps, top_ks, top_ps = (list(column) for column in zip(*entries))
        limited = [k for k in top_ks if k < vocab]
        filters = Filters(
            torch.tensor(lines), torch.tensor(min_ps), torch.tensor(top_ks), torch.tensor(top_ps, dtype=torch.float64),
            max_top_k=max(limited, default=0), open_top_p=any(k == vocab and p < math.inf for k, p in zip(top_ks, top_ps)),
        )  # fmt: skip
        filters = Filters(
            *(t.cuda() for t in (filters.rows, filters.min_p, filters.top_k, filters.top_p)),
            filters.max_top_k,
            filters.open_top_p,
        )
    heat = torch.rand(len(rows)) * 1.5 + 0.2 if temperature is None else torch.full((len(rows),), temperature)
    return Draws(torch.tensor(rows).cuda(), heat.cuda(), torch.randint(-(2**62), 2**62, (len(rows),)).cuda(), filters)


def both(logits: torch.Tensor, draws: Draws | None) -> tuple[list[int], list[int]]:
    positions = torch.randint(0, 100_000, (len(logits),), device="cuda")
    poison_free_memory()
    got = ops.choose_tokens(logits, positions, draws)
    with ops.backend("reference"):
        return got.tolist(), ops.choose_tokens(logits, positions, draws).tolist()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("lines", "vocab"), [(1, 2048), (64, 2048), (5, 1003), (3, 7), (16, 129280), (3, 163840)])
def test_draws_are_the_references(kind: str, lines: int, vocab: int) -> None:
    """Every noise of a row enters the choice, so equal tokens of many rows mean equal noise."""
    for spread in (1.0, 4.0):
        logits = torch.randn(lines, vocab, device="cuda") * spread
        got, want = both(logits, draws_of(list(range(lines)), [kind] * lines, vocab))
        assert got == want


def test_greedy_and_drawn_rows_of_every_kind_share_a_batch() -> None:
    kinds = [kind for kind in KINDS for _ in range(3)]
    rows = torch.randperm(2 * len(kinds))[: len(kinds)].tolist()
    wide = torch.randn(2 * len(kinds), 5016, device="cuda") * 3  # a head padded to equal shares
    got, want = both(wide[:, :5001], draws_of(rows, kinds, 5001))
    assert got == want


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 100.0])
def test_cold_and_hot_rows(temperature: float) -> None:
    got, want = both(torch.randn(32, 4096, device="cuda") * 5, draws_of(list(range(32)), ["none"] * 32, 4096, temperature))
    assert got == want


@pytest.mark.parametrize("drawn", [False, True])
def test_equal_masked_and_broken_logits(drawn: bool) -> None:
    """Report N05: of equal values the first counts; tokens at -inf are never chosen; a row without a finite best gives -1
    and leaves its neighbours alone."""
    logits = torch.randn(8, 3000, device="cuda")
    logits[0] = 1.5
    logits[1] = -math.inf
    logits[1, 2900:] = 0.0
    logits[2, 5] = math.nan
    logits[3] = -math.inf
    logits[4, 7] = math.inf
    logits[5, 100:] = -math.inf
    logits[6, 17] = -math.nan
    got, want = both(
        logits,
        draws_of(list(range(8)), ["none", "top_p", "none", "all", "top_k", "top_k", "min_p", "wide"], 3000) if drawn else None,
    )
    assert got == want and [got[i] for i in (2, 3, 4, 6)] == [-1] * 4
    assert got[1] >= 2900 and got[5] < 100 and (drawn or got[0] == 0)


def test_one_value_everywhere_is_one_tie_for_every_filter() -> None:
    kinds = list(KINDS)
    got, want = both(torch.zeros(len(kinds), 129280, device="cuda"), draws_of(list(range(len(kinds))), kinds, 129280))
    assert got == want


def test_a_draw_depends_on_neither_batch_nor_replay() -> None:
    logits = torch.randn(24, 20000, device="cuda") * 2
    draws = draws_of(list(range(24)), ["top_p", "none", "all"] * 8, 20000)
    positions = torch.arange(24, device="cuda")
    together = ops.choose_tokens(logits, positions, draws)
    alone = Draws(torch.zeros(1, dtype=torch.int64, device="cuda"), draws.temperature[7:8], draws.seeds[7:8], None)
    assert ops.choose_tokens(logits[7:8], positions[7:8], alone).item() == together[7].item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ops.choose_tokens(logits, positions, draws)
    for _ in range(3):
        replayed.fill_(-7)
        graph.replay()
        assert torch.equal(replayed, together)


def test_no_rows_and_what_does_not_fit() -> None:
    empty = torch.empty(0, 100, device="cuda")
    assert ops.choose_tokens(empty, torch.empty(0, dtype=torch.int64, device="cuda"), None).shape == (0,)
    with pytest.raises(KernelContractError, match="FP32"):
        ops.choose_tokens(empty.bfloat16(), torch.empty(0, dtype=torch.int64, device="cuda"), None)
    with pytest.raises(KernelContractError, match="at most"):
        ops.choose_tokens(torch.empty(1, 500_000, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), None)
