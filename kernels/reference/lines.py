"""Where the lines of decode sequences stand, and which of their tokens count."""

from __future__ import annotations

import torch

from kernels.layout import BLOCK_SIZE, DecodeLines, Drafts, SamplingTable


def decode_lines(
    starts: torch.Tensor, num_drafts: torch.Tensor | None, num_slots: torch.Tensor, block_table: torch.Tensor, query_len: int
) -> DecodeLines:
    last_slot = num_slots - 1
    end = torch.minimum(starts if num_drafts is None else starts + num_drafts, last_slot)  # position of the last live line
    lines = starts[:, None] + torch.arange(query_len, device=starts.device)
    live, positions = lines <= end[:, None], torch.minimum(lines, end[:, None]).clamp_(min=0)
    column = positions // BLOCK_SIZE
    slots = positions.add(block_table.gather(1, column) - column, alpha=BLOCK_SIZE)
    kept = end - torch.minimum(starts, last_slot)
    return DecodeLines(
        positions, torch.where(live, slots, -1), live, (end + 1).to(torch.int32), kept, (kept + 1).to(torch.int32)
    )


def accept_tokens(tokens: torch.Tensor, rows: torch.Tensor, table: SamplingTable, drafts: Drafts | None) -> torch.Tensor:
    b, s = drafts.tokens.shape if drafts is not None else (0, 0)
    lines, counted = b * (s + 1), tokens >= 0
    accepted = torch.zeros(b, dtype=torch.int64, device=tokens.device)
    if drafts is not None:
        accepted = count_accepted(tokens[:lines].view(b, s + 1), drafts.tokens, drafts.counts)
        counted[:lines] &= (torch.arange(s + 1, device=tokens.device) <= accepted[:, None]).flatten()
    entries = rows * table.vocab_size + tokens.clamp(min=0)
    table.history.view(-1).scatter_add_(0, entries, counted.to(torch.int32))
    return accepted


def count_accepted(targets: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """How many leading drafts equal what was chosen in their place, int64 [B].

    targets: int64 [B, S] chosen tokens, line j following the first j drafts; drafts: int64 [B, S - 1]
    num_drafts: int64 [B], drafts beyond it are padding
    """
    positions = torch.arange(drafts.shape[1], device=drafts.device)
    equal = (targets[:, :-1] == drafts) & (positions < num_drafts[:, None])
    return equal.long().cumprod(dim=1).sum(dim=1)
