"""Speculative decoding with the model's own draft head (MTP): verify what was drafted, draft again.

Exact acceptance keeps the plain path's tokens. Every line of a decode sequence is sampled as the plain path would sample that
position, noise keyed by (seed, position), and drafts are accepted while they equal the sampled tokens. A draft is the token
that the draft head's distribution q gives under the very same noise, so wherever q is close to the model's p both
choose the same token, at any temperature: with total variation distance d they agree with probability (1 - d) / (1 + d) or
more. Greedy rows draft the best token.

Ratio acceptance draws drafts from q with noise of their own, accepts one with probability min(1, p / q), and draws from
max(0, p - q) in place of the first rejected one: accepted with probability 1 - d, the most that any method reaches. The
distribution is the model's, but the tokens are not those of the plain path, and the q of the drafts are kept.

The draft layer's cache entry of position i depends on token i + 1 and hidden state i, and lies in the slot of position i
under the same block table as the other layers. Drafts stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.plan import NewSequence
from engine.sampler import draw
from engine.sampling_params import GREEDY_BELOW
from engine.sampling_state import is_greedy
from engine.staging import to_device
from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, DecodePlan, Draws, LatentCache
from kernels.reference.sampling import other_seeds, scale, uniform_noise
from models.batch import AttentionMetadata, ForwardBatch
from models.causal_lm import CausalLM


def count_accepted(targets: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """How many leading drafts equal what was sampled in their place, int64 [B].

    targets: int64 [B, S] sampled tokens, line j following the first j drafts; drafts: int64 [B, S - 1]
    num_drafts: int64 [B], drafts beyond it are padding
    """
    positions = torch.arange(drafts.shape[1], device=drafts.device)
    equal = (targets[:, :-1] == drafts) & (positions < num_drafts[:, None])
    return equal.long().cumprod(dim=1).sum(dim=1)


@dataclass(frozen=True)
class DecodeLines:
    """Where the lines of B decode sequences stand, S lines each.

    positions: int64 [B, S], padding stays at the last live position; slots: int64 [B, S], -1 on padding
    live: bool [B, S]; seq_lens: int32 [B]; num_drafts: int64 [B]
    """

    positions: torch.Tensor
    slots: torch.Tensor
    live: torch.Tensor
    seq_lens: torch.Tensor
    num_drafts: torch.Tensor

    @staticmethod
    def at(
        starts: torch.Tensor, num_drafts: torch.Tensor, num_slots: torch.Tensor, block_table: torch.Tensor, query_len: int
    ) -> DecodeLines:
        """Lines of sequences whose first positions only the device knows.

        starts: int64 [B]; num_drafts: int64 [B] planned; num_slots: int64 [B] slots of each sequence; block_table: int32
        A sequence that has ended without the planner knowing may start behind its slots or reach beyond them: lines there
        are not live, and their tokens are dropped.
        """
        last_slot = num_slots - 1
        end = torch.minimum(starts + num_drafts, last_slot)  # position of the last live line
        lines = starts[:, None] + torch.arange(query_len, device=starts.device)
        positions, live = torch.minimum(lines, end[:, None]), lines <= end[:, None]
        column = positions // BLOCK_SIZE
        slots = positions.add(block_table.gather(1, column) - column, alpha=BLOCK_SIZE)
        slots = torch.where(live, slots, -1)
        return DecodeLines(positions, slots, live, (end + 1).to(torch.int32), end - torch.minimum(starts, last_slot))


_DRAFT, _ACCEPT, _RESIDUAL = 1, 2, 3  # streams of noise of ratio acceptance; lines without a draft use that of the plain path
_RATIO_ELEMENTS = 1 << 23  # probabilities compared at once


@dataclass(frozen=True)
class Ratio:
    """Ratio acceptance of the drafts that n lines of logits verify; `draw` takes the place of the sampler's.

    drafts: int64 [n] the draft under verification, -1 on lines without one
    entries: int64 [n] where `probs` has the distribution it was drawn from; probs: FP32 [entries, vocab]
    """

    drafts: torch.Tensor
    entries: torch.Tensor
    probs: torch.Tensor

    def lines(self, index: torch.Tensor) -> Ratio:
        """The part of some of the lines."""
        return Ratio(self.drafts.index_select(0, index), self.entries.index_select(0, index), self.probs)

    def draw(self, logits: torch.Tensor, positions: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The draft where it is accepted, what replaces it where not, and a plain draw on lines without one; int64 [r].

        A token that replaces a draft is never the draft itself, so that counting equal tokens counts the accepted ones.
        """
        mine = self.lines(draws.rows)
        plain, target = draw(logits, positions, draws), scale(logits, draws).softmax(dim=-1)
        rows = max(1, _RATIO_ELEMENTS // logits.shape[1])
        columns = (target, plain, mine.drafts, mine.entries, draws.seeds, positions)
        return torch.cat([self._settle(*part) for part in zip(*(column.split(rows) for column in columns))])

    def _settle(
        self,
        target: torch.Tensor,
        plain: torch.Tensor,
        drafts: torch.Tensor,
        entries: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        probs = self.probs.index_select(0, entries)
        at = drafts.clamp(min=0)[:, None]
        p, q = target.gather(1, at)[:, 0], probs.gather(1, at)[:, 0]
        accepted = uniform_noise(other_seeds(seeds, _ACCEPT), positions, 1)[:, 0] * q < p
        residual = (target - probs).clamp_(min=0)
        draws = Draws(entries, torch.ones_like(p), other_seeds(seeds, _RESIDUAL), None)
        replaced = torch.where(residual.amax(dim=-1) > 0, draw(residual.log(), positions, draws), plain)
        return torch.where(drafts < 0, plain, torch.where(accepted, drafts, replaced))


@dataclass(frozen=True)
class DraftRows:
    """The sequences that just got a token, and where their next drafts start. All [n] but the table.

    lines: int64 line of the step whose sampled token is the sequence's last; rows: int64 row of the sequence
    positions: int64 position of that line; num_slots: int64 slots in the row's block table, 0 for a padded sequence
    block_table: int32 [n, max_blocks]
    """

    lines: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    num_slots: torch.Tensor
    block_table: torch.Tensor


class Drafter:
    """Owns the draft tokens, int64 [rows + 1, depth]; one per rank, all ranks of a replica draft the same.

    The last row takes what padded sequences draft.

    Without rows the passes still run, since their experts' collectives need every rank.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        depth: int,
        max_num_seqs: int,
        vocab_size: int,
        ratio: bool,
        num_heads: int,
        fmt: CacheFormat,
        device: torch.device,
    ) -> None:
        """ratio: whether drafts are for ratio acceptance, which keeps FP32 [rows + 1, depth, vocab] probabilities."""
        assert model.mtp is not None, "drafting needs a model that was loaded with its MTP head"
        self.tokens = torch.zeros(max_num_seqs + 1, depth, dtype=torch.int64, device=device)
        self._temperature = torch.full((max_num_seqs + 1,), GREEDY_BELOW, device=device)
        self._seeds = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._probs: torch.Tensor | None = None
        if ratio:
            self._probs = torch.zeros(max_num_seqs + 1, depth, vocab_size, device=device)
        self._model, self._head = model, model.mtp
        self.depth, self.padded_row = depth, max_num_seqs
        self._num_heads, self._format = num_heads, fmt

    def start(self, new: Sequence[NewSequence]) -> None:
        """Sequences take rows: remember how their tokens are drawn. At the lowest temperature a draw is the best token."""
        if not new:
            return
        rows = np.array([n.row for n in new], dtype=np.int64)
        temperature = np.array([GREEDY_BELOW if is_greedy(n) else n.params.temperature for n in new], dtype=np.float32)
        seeds = np.array([n.params.seed or 0 for n in new], dtype=np.int64)
        d_rows, d_temperature, d_seeds = to_device([rows, temperature, seeds], self.tokens.device)
        self._temperature.index_copy_(0, d_rows, d_temperature)
        self._seeds.index_copy_(0, d_rows, d_seeds)

    def ratio(self, drafts: torch.Tensor, num_drafts: torch.Tensor, rows: torch.Tensor) -> Ratio | None:
        """What ratio acceptance needs of a step's lines; None under exact acceptance.

        drafts: int64 [B, S - 1] under verification; num_drafts: int64 [B]; rows: int64 [n] of all sampled lines, the B * S of
        the decode sequences first
        """
        if self._probs is None:
            return None
        count, depth = drafts.shape
        offsets = torch.arange(depth + 1, device=rows.device)
        padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
        verified = torch.full_like(rows, -1)
        verified[: count * (depth + 1)] = torch.where(offsets < num_drafts[:, None], padded, -1).flatten()
        entries = rows * self.depth
        entries[: count * (depth + 1)] += offsets.clamp(max=self.depth - 1).repeat(count)
        return Ratio(verified, entries, self._probs.flatten(0, 1))

    def draft(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        accepted: torch.Tensor | None,
        rows: DraftRows,
        *,
        depth: int,
    ) -> None:
        """Bring the draft layer up to date with a finished step, then draft `depth` tokens for each of `rows`.

        batch: the step's own; hidden: [T, D] its hidden states; next_ids: int64 [T] the token after each line
        accepted: int64 [B] accepted drafts of each decode sequence; lines past them leave no entry
        """
        if accepted is not None:
            batch = self._without_rejected(batch, accepted)
        g = self._head.forward(next_ids, hidden, batch).index_select(0, rows.lines)
        positions = rows.positions
        for index in range(depth):
            tokens = self._choose(self._model.logits(g), rows.rows, positions + 2, index) if len(g) else rows.rows
            self.tokens[:, index].index_copy_(0, rows.rows, tokens)
            if index + 1 < depth:
                positions = positions + 1
                g = self._head.forward(tokens, g, self._single(batch.caches, positions, rows, batch.ep_rows))

    def _choose(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, index: int) -> torch.Tensor:
        """Draft number `index` of each row, int64 [n]. logits: FP32 [n, vocab]; positions: int64 [n] that the drafts will have."""
        draws = Draws(rows, self._temperature.index_select(0, rows), self._seeds.index_select(0, rows), None)
        if self._probs is not None:
            draws = replace(draws, seeds=other_seeds(draws.seeds, _DRAFT))
            self._probs[:, index].index_copy_(0, rows, scale(logits, draws).softmax(dim=-1))
        return draw(logits, positions, draws)

    def _without_rejected(self, batch: ForwardBatch, accepted: torch.Tensor) -> ForwardBatch:
        """The step's batch with only the accepted lines of each decode sequence live."""
        meta = batch.attention
        query_len, num_lines = meta.query_len, meta.num_decode_tokens
        live = torch.arange(query_len, device=accepted.device) <= accepted[:, None]
        slots = meta.slots.clone()
        slots[:num_lines].masked_fill_(~live.flatten(), -1)
        num_live = meta.num_query if meta.num_query is not None else torch.full_like(meta.seq_lens, query_len)
        num_query = torch.minimum((accepted + 1).to(torch.int32), num_live)
        seq_lens = meta.seq_lens - (num_live - num_query)
        attention = replace(
            meta, slots=slots, seq_lens=seq_lens, num_query=num_query, decode_plan=self._plan(seq_lens, query_len)
        )
        mask = batch.row_mask.clone() if batch.row_mask is not None else torch.ones_like(slots, dtype=torch.bool)
        mask[:num_lines] &= live.flatten()
        return replace(batch, attention=attention, row_mask=mask)

    def _single(self, caches: list[LatentCache], positions: torch.Tensor, rows: DraftRows, ep_rows: int) -> ForwardBatch:
        """One line a sequence, at `positions`. A position past the row's blocks is computed but leaves no entry."""
        column = (positions // BLOCK_SIZE).clamp(max=rows.block_table.shape[1] - 1)
        block = rows.block_table.gather(1, column[:, None])[:, 0].long()
        fits = positions < rows.num_slots
        seq_lens = torch.minimum(positions + 1, rows.num_slots).to(torch.int32)
        attention = AttentionMetadata(
            num_decode_seqs=len(positions),
            query_len=1,
            slots=torch.where(fits, block * BLOCK_SIZE + positions % BLOCK_SIZE, -1),
            block_table=rows.block_table,
            seq_lens=seq_lens,
            num_query=None,
            decode_plan=self._plan(seq_lens, 1) if len(positions) else None,
            prefill=None,
        )
        inside = torch.minimum(positions, rows.num_slots - 1).clamp(min=0)
        return ForwardBatch(inside, inside, attention, caches, row_mask=rows.num_slots > 0, ep_rows=ep_rows)

    def _plan(self, seq_lens: torch.Tensor, query_len: int) -> DecodePlan:
        return ops.plan_decode(seq_lens, query_len=query_len, num_heads=self._num_heads, fmt=self._format)
