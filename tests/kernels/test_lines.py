"""Where the lines of decode sequences stand, and which of their tokens count: on a CPU against numbers written out, on Hopper
against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.layout import Drafts, SamplingTable

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.hopper)]


@pytest.mark.parametrize("device", DEVICES)
def test_lines_of_sequences_that_may_have_ended(device: str) -> None:
    """Lines behind a sequence's slots are padding, and a sequence that starts behind them, or pads, writes nothing."""
    table = torch.tensor([[7, 3], [5, 9], [8, 2], [4, 4]], dtype=torch.int32, device=device)
    starts, slots = torch.tensor([62, 126, 130, 0], device=device), torch.tensor([128, 128, 128, 0], device=device)
    at = ops.decode_lines(starts, torch.full_like(starts, 2), slots, table, 3)
    assert at.num_drafts.tolist() == [2, 1, 0, 0] and at.num_query.tolist() == [3, 2, 1, 1]
    assert at.seq_lens.tolist() == [65, 128, 128, 0] and at.seq_lens.dtype == at.num_query.dtype == torch.int32
    assert at.positions.tolist() == [[62, 63, 64], [126, 127, 127], [127, 127, 127], [0, 0, 0]]
    assert at.slots.tolist() == [[7 * 64 + 62, 7 * 64 + 63, 3 * 64], [9 * 64 + 62, 9 * 64 + 63, -1], [-1] * 3, [-1] * 3]
    assert at.live.tolist() == [[True, True, True], [True, True, False], [False] * 3, [False] * 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_len", [1, 4])
def test_many_lines_are_the_reference_s(query_len: int, device: str) -> None:
    count = 300
    wide = torch.randint(0, 5000, (count, 40), dtype=torch.int32, device=device)
    num_slots = torch.randint(0, 2000, (count,), device=device)
    starts = (num_slots + torch.randint(-90, 3, (count,), device=device)).clamp_(min=0)
    drafts = torch.randint(0, query_len, (count,), device=device)
    got = ops.decode_lines(starts, drafts, num_slots, wide[:, :33], query_len)
    with ops.backend("reference"):
        want = ops.decode_lines(starts, drafts, num_slots, wide[:, :33], query_len)
    alone, none = (ops.decode_lines(starts, t, num_slots, wide, 1) for t in (None, torch.zeros_like(starts)))
    assert all(torch.equal(a, b) for a, b in zip(vars(alone).values(), vars(none).values()))
    for name, value in vars(want).items():
        assert torch.equal(getattr(got, name), value) and getattr(got, name).dtype == value.dtype, name


@pytest.mark.parametrize("device", DEVICES)
def test_accepted_drafts_and_the_tokens_that_count(device: str) -> None:
    """Report M08: what comes behind a rejected draft is in nobody's history, nor is a broken line."""
    targets = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [-1, 6, 7], [5, 6, 7]], device=device)
    wide = torch.tensor([[5, 6, 9], [5, 9, 9], [4, 6, 9], [5, 6, 9], [5, 6, 9]], device=device)
    counts = torch.tensor([2, 2, 2, 2, 1], device=device)
    table = SamplingTable.allocate(8, 10, device)
    table.history[2, 5] = -(2**31) + 3
    rows = torch.tensor([3, 4, 2, 0, 1], device=device).repeat_interleave(3)
    tokens, rows = torch.cat((targets.flatten(), targets[0, :1])), torch.cat((rows, rows[:1]))
    accepted = ops.accept_tokens(tokens, rows, table, Drafts(wide[:, :2], counts, None))
    assert accepted.tolist() == [2, 1, 0, 0, 1]
    want = torch.zeros(8, 10, dtype=torch.int32)
    want[3, [5, 6, 7]] += torch.tensor([2, 1, 1], dtype=torch.int32)  # its line behind the sequences is token 5 again
    want[4, [5, 6]] += 1
    want[2, 5] = -(2**31) + 4
    want[1, [5, 6]] += 1
    assert torch.equal(table.history.cpu(), want)
    assert ops.accept_tokens(tokens[:2], rows[:2], table).shape == (0,)
    assert table.history[3, [5, 6]].tolist() == [3, 2]
