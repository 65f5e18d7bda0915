"""Sampling as pure functions over tensors, on any device.

Order (engine/sampling_params.py): penalties and logit_bias; allowed tokens, min_tokens and grammar masks; temperature;
min_p, top_k, top_p; Gumbel-max. Log probabilities are those of the raw logits, before any of it.

The choice itself, from temperature on, is `ops.choose_tokens`. Nothing here knows requests or steps;
engine/sampling_state.py keeps those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels import ops
from kernels.layout import Draws


@dataclass(frozen=True)
class Penalties:
    """rows int64 [r]; FP32 [r] factors; slots int64 [r]: lines of the count tables (see `TokenCounts`)."""

    rows: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True)
class TokenCounts:
    """in_prompt: bool [slots, vocab]; in_output: int32 [slots, vocab], how often a token was generated."""

    in_prompt: torch.Tensor
    in_output: torch.Tensor


@dataclass(frozen=True)
class Entries:
    """Single logits to change: rows int64 [m], tokens int64 [m], and a value per entry [m]."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """What n rows of logits need; a part that no row needs is None. Rows in no part are greedy.

    bias: FP32 values to add; late_stops: int64 positions before which a stop token is barred (min_tokens)
    mask_rows, masks: int64 [a] and int32 [a, ceil(vocab / 32)], bit t % 32 of word t // 32 allows token t
    logprob_rows: int64 [l]; num_logprobs: alternatives to return, the most that any row wants
    """

    draws: Draws | None = None
    penalties: Penalties | None = None
    bias: Entries | None = None
    late_stops: Entries | None = None
    mask_rows: torch.Tensor | None = None
    masks: torch.Tensor | None = None
    logprob_rows: torch.Tensor | None = None
    num_logprobs: int = 0

    @property
    def changes_logits(self) -> bool:
        return any(part is not None for part in (self.penalties, self.bias, self.late_stops, self.masks))


GREEDY = SamplingBatch()
Drawer = Callable[[torch.Tensor, torch.Tensor, Draws], torch.Tensor]  # of the signature of `draw`


@dataclass(frozen=True)
class TokenScores:
    """Log probabilities of n tokens under the raw distribution, their ranks (1 is best), and the best alternatives.

    logprob FP32 [n], rank int64 [n], top_ids int64 [n, k], top_logprobs FP32 [n, k]
    """

    logprob: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def sample(
    logits: torch.Tensor,
    positions: torch.Tensor,
    batch: SamplingBatch,
    counts: TokenCounts | None = None,
    counted: torch.Tensor | None = None,
    drawer: Drawer | None = None,
) -> torch.Tensor:
    """Choose one token a row.

    logits: FP32 [n, vocab], not modified; positions: int64 [n], the position the chosen token will have
    counts: tables of the penalised rows; their in_output is advanced by the chosen tokens
    counted: bool [n], False where the chosen token is not counted; None counts all
    drawer: draws the rows that are not greedy, in place of `draw`
    Returns int64 [n]; -1 where the row has no finite best logit (NaN, inf, or everything masked).
    """
    if batch.changes_logits:
        logits = _change_logits(logits.clone(), positions, batch, counts)
    draws = batch.draws
    if drawer is None or draws is None:
        tokens = ops.choose_tokens(logits, positions, draws)
    else:
        greedy = ops.choose_tokens(logits, positions, None)
        drawn = drawer(logits.index_select(0, draws.rows), positions.index_select(0, draws.rows), draws)
        tokens = torch.where(greedy < 0, greedy, greedy.index_copy(0, draws.rows, drawn))
    if batch.penalties is not None and counts is not None:
        chosen = tokens.index_select(0, batch.penalties.rows).clamp_(min=0)
        one = torch.ones((), dtype=torch.int32, device=logits.device)
        if counted is not None:
            one = counted.index_select(0, batch.penalties.rows).to(torch.int32)
        counts.in_output.index_put_((batch.penalties.slots, chosen), one, accumulate=True)
    return tokens


def draw(logits: torch.Tensor, positions: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One token of each line, all of them drawn, whatever `draws.rows`; int64 [r]. A broken line gives token 0."""
    every = torch.arange(len(logits), device=logits.device)
    return ops.choose_tokens(logits, positions, replace(draws, rows=every)).clamp_(min=0)


def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenScores:
    """Log-softmax of raw logits [n, vocab] FP32 at `tokens` int64 [n], ranks, and the num_top best alternatives."""
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return TokenScores((chosen - norm)[:, 0], (logits > chosen).sum(-1) + 1, top.indices, top.values - norm)


# ---- logits -----------------------------------------------------------------------------------------------------


def _change_logits(
    logits: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch, counts: TokenCounts | None
) -> torch.Tensor:
    """Apply everything that comes before temperature, in place."""
    if batch.penalties is not None:
        assert counts is not None
        p = batch.penalties
        in_output = counts.in_output.index_select(0, p.slots)
        seen = (in_output > 0) | counts.in_prompt.index_select(0, p.slots)
        rows = penalize(logits.index_select(0, p.rows), seen, in_output, p.repetition, p.presence, p.frequency)
        logits.index_copy_(0, p.rows, rows)
    if batch.bias is not None:
        logits.index_put_((batch.bias.rows, batch.bias.tokens), batch.bias.values, accumulate=True)
    if batch.late_stops is not None:
        stops = batch.late_stops
        early = positions.index_select(0, stops.rows) < stops.values
        barred = torch.where(early, -torch.inf, 0.0).to(logits.dtype)
        logits.index_put_((stops.rows, stops.tokens), barred, accumulate=True)
    if batch.masks is not None and batch.mask_rows is not None:
        allowed = unpack_mask(batch.masks, logits.shape[1])
        masked = logits.index_select(0, batch.mask_rows).masked_fill_(~allowed, -torch.inf)
        logits.index_copy_(0, batch.mask_rows, masked)
    return logits


def penalize(
    logits: torch.Tensor,
    seen: torch.Tensor,
    in_output: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalties of [r, vocab] logits.

    repetition divides positive and multiplies negative logits of tokens seen in prompt or output (seen: bool [r, vocab]);
    presence and frequency subtract once, and once per occurrence, for generated tokens (in_output: int32 [r, vocab]).
    """
    factor = repetition[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - frequency[:, None] * in_output - presence[:, None] * (in_output > 0)


def unpack_mask(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool [r, vocab] from packed int32 [r, words]; token t is bit t % 32 of word t // 32. Missing words forbid."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks[:, :, None] >> bits) & 1).bool().flatten(1)
    missing = vocab_size - allowed.shape[1]
    return torch.nn.functional.pad(allowed, (0, missing)) if missing > 0 else allowed[:, :vocab_size]
