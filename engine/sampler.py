"""Sampling as pure functions over tensors, on any device.

Order (engine/sampling_params.py): penalties and logit_bias; allowed tokens, min_tokens and grammar masks; temperature;
min_p, top_k, top_p; Gumbel-max. Log probabilities are those of the raw logits, before any of it.

Randomness has no state: the noise of a token is hashed from (seed, position, token id) in integer arithmetic, so a seeded
result depends on neither batch, row, rank, step nor device. Masses of top_p are integers for the same reason: their sums
do not depend on the order of addition. Nothing here knows requests or steps; engine/sampling_state.py keeps those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, odd, as a signed 64-bit number
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
_MASS_ONE = float(1 << 32)  # integer mass of the best token; 2**17 tokens of that mass still sum far below 2**63
_NOISE_ELEMENTS = 1 << 23  # noise drawn at once: 64 MiB an intermediate
NUM_CANDIDATES = 1024  # best tokens looked at before a whole row is sorted


@dataclass(frozen=True)
class Filters:
    """Rows (indices into the drawn rows) that restrict what may be drawn. All tensors [r].

    Neutral values: min_p 0, top_k the vocabulary, top_p inf (1.0 would still drop tokens whose mass rounds to 0).
    """

    rows: torch.Tensor  # int64
    min_p: torch.Tensor  # FP32
    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # FP64
    max_top_k: int  # largest top_k below the vocabulary, on the host; 0 without one
    open_top_p: bool  # some row has top_p without top_k


@dataclass(frozen=True)
class Draws:
    """Rows that are sampled rather than greedy. rows int64 [r], temperature FP32 [r], seeds int64 [r]."""

    rows: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    filters: Filters | None


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
    best, tokens = logits.max(dim=-1)
    if batch.draws is not None:
        draws = batch.draws
        drawn = (drawer or draw)(logits.index_select(0, draws.rows), positions.index_select(0, draws.rows), draws)
        tokens.index_copy_(0, draws.rows, drawn)
    tokens = torch.where(best.isfinite(), tokens, -1)
    if batch.penalties is not None and counts is not None:
        chosen = tokens.index_select(0, batch.penalties.rows).clamp_(min=0)
        one = torch.ones((), dtype=torch.int32, device=logits.device)
        if counted is not None:
            one = counted.index_select(0, batch.penalties.rows).to(torch.int32)
        counts.in_output.index_put_((batch.penalties.slots, chosen), one, accumulate=True)
    return tokens


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


# ---- drawing ----------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, positions: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw from softmax(logits / temperature) restricted by the filters, by adding Gumbel noise and taking the best."""
    scaled = scale(logits, draws)
    rows = max(1, _NOISE_ELEMENTS // logits.shape[1])  # bounds the noise's workspace
    parts = zip(scaled.split(rows), draws.seeds.split(rows), positions.split(rows))
    return torch.cat([part.add_(gumbel_noise(seeds, at, part.shape[1])).argmax(dim=-1) for part, seeds, at in parts])


def scale(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Logits after temperature and filters, FP32 [r, vocab]: `draw` draws from their softmax."""
    scaled = logits - logits.amax(dim=-1, keepdim=True)  # best is 0: no temperature can make it overflow
    scaled /= draws.temperature[:, None]
    if draws.filters is not None:
        f = draws.filters
        scaled.index_copy_(0, f.rows, restrict(scaled.index_select(0, f.rows), f))
    return scaled


def restrict(scaled: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Set what min_p, then top_k, then top_p drop to -inf.

    scaled: FP32 [r, vocab], logits after temperature with the best at 0. A token survives top_k when fewer than k tokens
    are better, and top_p when the better tokens of the set so far hold less than top_p of that set's mass: the best token
    always survives, and equal tokens share their fate.
    """
    scaled = scaled.masked_fill(scaled < filters.min_p.log()[:, None], -torch.inf)
    vocab = scaled.shape[1]
    if not filters.max_top_k and not filters.open_top_p:
        return scaled  # only min_p
    few = min(max(NUM_CANDIDATES if filters.open_top_p else 1, filters.max_top_k), vocab)
    if filters.open_top_p and scaled.device.type != "cpu":
        few = vocab  # whether few candidates are enough is only known on the device
    threshold, complete = _threshold(scaled, filters, few)
    if filters.open_top_p and few < vocab and not bool(complete.all()):
        threshold, _ = _threshold(scaled, filters, vocab)
    return scaled.masked_fill(scaled < threshold, -torch.inf)


def _threshold(scaled: torch.Tensor, filters: Filters, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest logit that top_k and top_p keep, FP32 [r, 1], from the best candidates of each row.

    Also whether the border lies within the candidates, bool [r]; always true when they are the whole row.
    """
    vocab = scaled.shape[1]
    best = scaled.sort(dim=-1, descending=True).values if num_candidates == vocab else scaled.topk(num_candidates).values
    within_k = torch.arange(num_candidates, device=scaled.device) < filters.top_k[:, None]
    kth = best.gather(1, (filters.top_k[:, None] - 1).clamp(max=num_candidates - 1))
    # The top_k set's mass counts tokens equal to the k-th best, which all stay. Rows without top_k keep everything.
    no_top_k = filters.top_k[:, None] >= vocab
    kept = torch.where(no_top_k | (scaled >= kth), _mass(scaled), 0)
    total = kept.sum(-1, keepdim=True)
    mass = _mass(best)
    before = mass.cumsum(-1) - mass
    within_p = before.double() < filters.top_p[:, None] * total.double()
    num_kept = (within_k & within_p).sum(-1, keepdim=True)
    neutral = no_top_k & filters.top_p[:, None].isinf()
    threshold = torch.where(neutral, -torch.inf, best.gather(1, (num_kept - 1).clamp(min=0)))
    return threshold, neutral[:, 0] | (num_kept[:, 0] < num_candidates) | (num_candidates == vocab)


def _mass(scaled: torch.Tensor) -> torch.Tensor:
    """Unnormalized probability as an integer, 2**32 for the best token."""
    return (scaled.exp() * _MASS_ONE).to(torch.int64)


# ---- noise ------------------------------------------------------------------------------------------------------


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise FP32 [n, vocab_size], a pure function of (seed, position, token id).

    seeds, positions: int64 [n]. Each (seed, position) opens a SplitMix64 stream, read at the token id. The logarithms are
    FP64 and rounded once, so that CPU and CUDA agree to the bit but for a last-place difference of about 1 in 2**28.
    """
    return uniform_noise(seeds, positions, vocab_size).log_().neg_().log_().neg_().float()


def uniform_noise(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """FP64 [n, size], strictly inside (0, 1): the stream of each (seed, position), read at 1 .. size."""
    key = _mix(_mix(seeds + _GOLDEN) + positions * _MIX_A)
    tokens = torch.arange(1, size + 1, device=seeds.device)
    bits = _mix(key[:, None] + (tokens * _GOLDEN))
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def other_seeds(seeds: torch.Tensor, stream: int) -> torch.Tensor:
    """Seeds of a further stream of noise, 1 .. n, unrelated to that of `seeds`; int64 [n]."""
    return _mix(_mix(seeds) + stream)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every input bit reaches every output bit."""
    z = (z ^ _shift_right(z, 30)) * _MIX_A
    z = (z ^ _shift_right(z, 27)) * _MIX_B
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64, which torch only shifts arithmetically."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
