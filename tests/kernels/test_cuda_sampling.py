"""The choice of tokens on Hopper against the reference, to the token."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import ops
from kernels.errors import KernelContractError
from kernels.layout import Drafts, SamplingTable
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


def table_of(
    rows: list[int], kinds: list[str], vocab: int, temperature: float | None = None, num_rows: int = 0
) -> SamplingTable:
    """A table in which `rows` are drawn, each with its kind of filter, and the others greedy."""
    table = SamplingTable.allocate(num_rows or max(rows) + 1, vocab, "cpu")
    for row, kind in zip(rows, kinds):
        min_p, top_k, top_p = KINDS[kind]
        table.min_p[row], table.top_k[row] = min_p or 0.0, min(top_k or vocab, vocab)
        table.top_p[row] = math.inf if top_p is None else top_p
    table.temperature[rows] = torch.rand(len(rows)) * 1.5 + 0.2 if temperature is None else temperature
    table.seeds[rows] = torch.randint(-(2**62), 2**62, (len(rows),))
    return on_device(table)


def on_device(table: SamplingTable) -> SamplingTable:
    return SamplingTable(**{name: column.cuda() for name, column in vars(table).items()})


def both(
    logits: torch.Tensor, table: SamplingTable, rows: list[int] | None = None, drafts: Drafts | None = None
) -> tuple[list[int], list[int]]:
    """Tokens of the kernel and of the reference."""
    lines = torch.tensor(rows if rows is not None else range(len(logits))).cuda()
    positions = torch.randint(0, 100_000, (len(logits),), device="cuda")
    poison_free_memory()
    got = ops.choose_tokens(logits, positions, lines, table, drafts)
    with ops.backend("reference"):
        return got.tolist(), ops.choose_tokens(logits, positions, lines, table, drafts).tolist()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("lines", "vocab"), [(1, 2048), (64, 2048), (5, 1003), (3, 7), (16, 129280), (3, 163840)])
def test_draws_are_the_references(kind: str, lines: int, vocab: int) -> None:
    """Every noise of a row enters the choice, so equal tokens of many rows mean equal noise."""
    for spread in (1.0, 4.0):
        logits = torch.randn(lines, vocab, device="cuda") * spread
        got, want = both(logits, table_of(list(range(lines)), [kind] * lines, vocab))
        assert got == want


def test_greedy_and_drawn_rows_of_every_kind_share_a_batch() -> None:
    kinds = [kind for kind in KINDS for _ in range(3)]
    rows = torch.randperm(2 * len(kinds))[: len(kinds)].tolist()
    wide = torch.randn(2 * len(kinds), 5016, device="cuda") * 3  # a head padded to equal shares
    table = table_of(rows, kinds, 5001, num_rows=len(wide))
    got, want = both(wide[:, :5001], table)
    assert got == want
    back = list(reversed(range(len(wide))))
    got, want = both(wide[:, :5001], table, rows=back)
    assert got == want


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 100.0])
def test_cold_and_hot_rows(temperature: float) -> None:
    got, want = both(torch.randn(32, 4096, device="cuda") * 5, table_of(list(range(32)), ["none"] * 32, 4096, temperature))
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
    rows = list(range(8)) if drawn else []
    table = table_of(rows, ["none", "top_p", "none", "all", "top_k", "top_k", "min_p", "wide"], 3000, num_rows=8)
    got, want = both(logits, table)
    assert got == want and [got[i] for i in (2, 3, 4, 6)] == [-1] * 4
    assert got[1] >= 2900 and got[5] < 100 and (drawn or got[0] == 0)


def test_one_value_everywhere_is_one_tie_for_every_filter() -> None:
    kinds = list(KINDS)
    got, want = both(torch.zeros(len(kinds), 129280, device="cuda"), table_of(list(range(len(kinds))), kinds, 129280))
    assert got == want


def edited(table: SamplingTable, vocab: int) -> SamplingTable:
    """Penalties, single logits and masks on some of the rows, all together on the last two."""
    host = SamplingTable(**{name: column.cpu() for name, column in vars(table).items()})
    last = len(host.seeds) - 1
    for row in (1, last - 1, last):
        host.repetition[row], host.presence[row], host.frequency[row] = 1.3, 0.7, 0.4
        host.history[row] = torch.randint(0, 4, (vocab,)) * (torch.rand(vocab) < 0.3)
        host.history[row] += (torch.rand(vocab) < 0.2) * -(2**31)
    for row in (2, last - 1, last):
        tokens = torch.randperm(vocab)[:200]
        host.num_edits[row] = 201
        host.edit_tokens[row, :201] = torch.cat((tokens, tokens[:1]))  # a biased token that is barred, too
        host.edit_values[row, :200] = torch.randn(200) * 5
        host.edit_values[row, 200:201] = -math.inf
        host.edit_until[row, :200] = torch.tensor([0, 2**62]).repeat(100)
        host.edit_until[row, 200] = 2**62
    for row in (3, last - 1, last):
        host.masked[row] = True
        host.masks[row] = torch.randint(-(2**31), 2**31, host.masks[row].shape)
    return on_device(host)


@pytest.mark.parametrize(("vocab", "drawn"), [(2048, True), (5001, False), (129280, True)])
def test_edits_are_the_references(vocab: int, drawn: bool) -> None:
    """Report M08: penalties, biases, barred and masked tokens, of lines that verify drafts too: those before a line count."""
    num_rows, query_len = 9, 4
    rows = list(range(num_rows)) if drawn else []
    table = edited(table_of(rows, (["none", "top_p", "all"] * 3)[: len(rows)], vocab, num_rows=num_rows), vocab)
    lines = [row for row in range(num_rows - 1) for _ in range(query_len)] + [num_rows - 1]
    logits = torch.randn(len(lines), vocab, device="cuda") * 3
    drafts = logits[: num_rows * query_len - query_len].view(num_rows - 1, query_len, vocab)[:, :3].argmax(-1)
    counts = torch.tensor([3, 3, 0, 1, 2, 3, 3, 3]).cuda()
    got, want = both(logits, table, lines, Drafts(drafts, counts, None))
    assert got == want
    assert got != both(logits, table_of(rows, ["none"] * len(rows), vocab, num_rows=num_rows), lines)[0]


@pytest.mark.parametrize(
    ("rows", "vocab", "kind"), [(64, 2048, "none"), (64, 2048, "top_p"), (16, 129280, "none"), (40, 5001, "all")]
)
def test_ratio_acceptance_is_the_reference_s(rows: int, vocab: int, kind: str) -> None:
    """Report M05: the drafts, their distributions, and what becomes of them. Sums of probabilities have an order, so a draw in
    ten thousand may differ."""
    depth, all_rows = 3, list(range(rows))
    table = table_of(all_rows, [kind] * rows, vocab, num_rows=rows + 1)
    lines = torch.tensor([*all_rows, rows, rows]).cuda()  # the last row is greedy, and pads
    probs = {name: torch.zeros(rows + 1, depth, vocab, device="cuda") for name in ("cuda", "reference")}
    drafts: dict[str, list[torch.Tensor]] = {name: [] for name in probs}
    truth = torch.randn(rows * (depth + 1) + 3, vocab, device="cuda") * 3
    for index in range(depth):
        guess = truth[index : rows * (depth + 1) : depth + 1]
        guess = torch.cat((guess, guess[:2])) + torch.randn(rows + 2, vocab, device="cuda") * 0.6
        for name in probs:
            with ops.backend(name):
                drafts[name].append(ops.draft_tokens(guess, lines + 17 + index, lines, table, probs[name][:, index]))
    differing = sum(int((a[:rows] != b[:rows]).sum()) for a, b in zip(*drafts.values()))
    assert differing <= 1
    torch.testing.assert_close(probs["cuda"][:rows], probs["reference"][:rows], rtol=1e-5, atol=1e-9)
    sampled = [row for row in all_rows for _ in range(depth + 1)] + [0, 5, rows]
    counts = torch.tensor([3, 3, 0, 1, 2, 3, 3, 3]).repeat(rows)[:rows].cuda()
    got, want = both(truth, table, sampled, Drafts(torch.stack(drafts["cuda"], 1)[:rows], counts, probs["cuda"]))
    assert sum(a != b for a, b in zip(got, want)) <= 1 + len(got) // 10_000
    plain, _ = both(truth, table, sampled)
    verified = [i for i in range(rows * (depth + 1)) if i % (depth + 1) < counts[i // (depth + 1)]]
    taken = torch.stack(drafts["cuda"], 1)[:rows].flatten().tolist()
    accepted = sum(got[i] == taken[i // (depth + 1) * depth + i % (depth + 1)] for i in verified)
    assert 0.3 * len(verified) < accepted < len(verified)
    assert [got[i] for i in (-3, -2, -1)] == [want[i] for i in (-3, -2, -1)] and got != plain


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, math.inf), (0.7, 0.9)])
def test_ratio_acceptance_draws_from_the_target(temperature: float, top_p: float) -> None:
    """Report M04: chi-square of 20,000 tokens that ratio acceptance gives against the target's distribution; against that of
    the drafts it fails."""
    runs, vocab = 20_000, 8
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(vocab, generator=generator) * 1.5
    guess = target + torch.randn(vocab, generator=generator) * 0.7
    table = SamplingTable.allocate(runs, vocab, "cuda")
    table.temperature.fill_(temperature)
    table.top_p.fill_(top_p)
    rows = table.seeds.copy_(torch.arange(runs)).clone()
    probs = torch.zeros(runs, 1, vocab, device="cuda")
    drafts = ops.draft_tokens(guess.cuda().repeat(runs, 1), torch.full_like(rows, 5), rows, table, probs[:, 0])
    tokens = ops.choose_tokens(
        target.cuda().repeat(2 * runs, 1), torch.full((2 * runs,), 5, device="cuda"), rows.repeat_interleave(2), table,
        Drafts(drafts[:, None], torch.ones_like(rows), probs),
    )[::2]  # fmt: skip

    def statistic(expected: torch.Tensor) -> float:
        count = torch.bincount(tokens, minlength=vocab).cpu().double()
        assert (count[expected == 0] == 0).all()
        cells = expected > 0
        return float(((count - runs * expected)[cells] ** 2 / (runs * expected)[cells]).sum())

    exact = (target.double() / temperature).softmax(-1)
    order = exact.argsort(descending=True)
    exact[order[exact[order].cumsum(0) - exact[order] >= top_p]] = 0
    assert statistic(exact / exact.sum()) < 18.5  # 7 degrees of freedom at most, p = 0.01
    if top_p > 1:
        assert statistic((guess.double() / temperature).softmax(-1)) > 100
    accepted = float((tokens == drafts).float().mean())
    common = float(torch.minimum(exact / exact.sum(), (guess.double() / temperature).softmax(-1)).sum())
    assert abs(accepted - common) < 0.015


def test_a_draw_depends_on_neither_batch_nor_replay() -> None:
    logits = torch.randn(24, 20000, device="cuda") * 2
    table = table_of(list(range(24)), ["top_p", "none", "all"] * 8, 20000)
    rows = positions = torch.arange(24, device="cuda")
    together = ops.choose_tokens(logits, positions, rows, table)
    assert ops.choose_tokens(logits[7:8], positions[7:8], rows[7:8], table).item() == together[7].item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ops.choose_tokens(logits, positions, rows, table)
    for _ in range(3):
        replayed.fill_(-7)
        graph.replay()
        assert torch.equal(replayed, together)
    table.seeds.add_(1)
    table.temperature[3] = 0.0
    graph.replay()
    assert torch.equal(replayed, ops.choose_tokens(logits, positions, rows, table)) and not torch.equal(replayed, together)
    assert replayed[3] == logits[3].argmax()


def test_no_rows_and_what_does_not_fit() -> None:
    table, none = SamplingTable.allocate(1, 100, "cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    empty = torch.empty(0, 100, device="cuda")
    assert ops.choose_tokens(empty, none, none, table).shape == (0,)
    with pytest.raises(KernelContractError, match="FP32"):
        ops.choose_tokens(empty.bfloat16(), none, none, table)
    with pytest.raises(KernelContractError, match="for 100 tokens"):
        ops.choose_tokens(torch.empty(0, 99, device="cuda"), none, none, table)
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(KernelContractError, match="at most"):
        ops.choose_tokens(torch.empty(1, 500_000, device="cuda"), zero, zero, SamplingTable.allocate(1, 500_000, "cuda"))
