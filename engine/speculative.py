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

from dataclasses import dataclass, replace

import torch

from kernels import ops
from kernels.layout import CacheFormat, DecodeLines, DecodePlan, Drafts, SamplingTable
from models.batch import AttentionMetadata, ForwardBatch
from models.causal_lm import CausalLM


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

    The last row takes what padded sequences draft. Without rows the passes still run, since their experts' collectives need
    every rank.
    """

    def __init__(
        self, model: CausalLM, table: SamplingTable, *, depth: int, ratio: bool, num_heads: int, fmt: CacheFormat
    ) -> None:
        """table: of the rows, a padded one included; ratio: whether drafts are for ratio acceptance, which keeps FP32
        [rows + 1, depth, vocab] probabilities."""
        assert model.mtp is not None, "drafting needs a model that was loaded with its MTP head"
        rows, vocab_size = table.history.shape
        self.depth, device = depth, table.history.device
        self.tokens = torch.zeros(rows, depth, dtype=torch.int64, device=device)
        self._probs = torch.zeros(rows, depth, vocab_size, device=device) if ratio else None
        self._model, self._head, self._table = model, model.mtp, table
        self._num_heads, self._format = num_heads, fmt

    def verified(self, rows: torch.Tensor, num_drafts: torch.Tensor, query_len: int) -> Drafts:
        """The drafts that a step of so many lines a sequence verifies; rows, num_drafts: int64 [B]."""
        return Drafts(self.tokens.index_select(0, rows)[:, : query_len - 1], num_drafts, self._probs)

    def draft(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        accepted: DecodeLines | None,
        rows: DraftRows,
        *,
        depth: int,
    ) -> None:
        """Bring the draft layer up to date with a finished step, then draft `depth` tokens for each of `rows`.

        batch: the step's own; hidden: [T, D] its hidden states; next_ids: int64 [T] the token after each line
        accepted: lines of the decode sequences up to their last accepted draft; those past it leave no entry. None: all lines
        """
        if accepted is not None:
            batch = self._without_rejected(batch, accepted)
        g = self._head.forward(next_ids, hidden, batch).index_select(0, rows.lines)
        ahead = rows.positions + torch.arange(depth + 2, device=hidden.device)[:, None]  # [i] positions i further on
        for index in range(depth):
            tokens = rows.rows
            if len(g):
                probs = None if self._probs is None else self._probs[:, index]
                tokens = ops.draft_tokens(self._model.logits(g), ahead[index + 2], rows.rows, self._table, probs)
            self.tokens[:, index].index_copy_(0, rows.rows, tokens)
            if index + 1 < depth:
                g = self._head.forward(tokens, g, self._single(batch, ahead[index + 1], rows))

    def _without_rejected(self, batch: ForwardBatch, accepted: DecodeLines) -> ForwardBatch:
        """The step's batch with only the accepted lines of each decode sequence live."""
        meta, num_lines = batch.attention, batch.attention.num_decode_tokens
        slots, live, mask = accepted.slots.flatten(), accepted.live.flatten(), batch.row_mask
        if num_lines < len(meta.slots):
            assert mask is not None
            slots, live = torch.cat((slots, meta.slots[num_lines:])), torch.cat((live, mask[num_lines:]))
        attention = replace(
            meta, slots=slots, seq_lens=accepted.seq_lens, num_query=accepted.num_query, decode_plan=self._plan(accepted)
        )
        return replace(batch, attention=attention, row_mask=live)

    def _single(self, batch: ForwardBatch, positions: torch.Tensor, rows: DraftRows) -> ForwardBatch:
        """One line a sequence, at `positions`. A position past the row's blocks is computed but leaves no entry."""
        at = ops.decode_lines(positions, None, rows.num_slots, rows.block_table, 1)
        attention = AttentionMetadata(
            num_decode_seqs=len(positions),
            query_len=1,
            slots=at.slots[:, 0],
            block_table=rows.block_table,
            seq_lens=at.seq_lens,
            num_query=None,
            decode_plan=self._plan(at) if len(positions) else None,
            prefill=None,
        )
        inside = at.positions[:, 0]
        return ForwardBatch(inside, inside, attention, batch.caches, row_mask=at.live[:, 0], ep_rows=batch.ep_rows)

    def _plan(self, lines: DecodeLines) -> DecodePlan:
        return ops.plan_decode(lines.seq_lens, query_len=lines.slots.shape[1], num_heads=self._num_heads, fmt=self._format)
