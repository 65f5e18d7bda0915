"""The choice of tokens from logits: greedy, or a draw after temperature, min_p, top_k and top_p, by Gumbel-max; drafts, and
their acceptance by ratio.

Randomness has no state: the noise of a token is hashed from (seed, position, token id) in integer arithmetic, so a seeded
result depends on neither batch, row, rank, step nor device. Masses of top_p are integers for the same reason: their sums
do not depend on the order of addition.
"""

from __future__ import annotations

import torch

from kernels.layout import Drafts, SamplingTable

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, odd, as a signed 64-bit number
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
_DRAFT, _ACCEPT, _RESIDUAL = 1, 2, 3  # streams of noise of ratio acceptance, beside that of plain draws
_COUNT = 0x7FFFFFFF  # bits of a token's history that count it
_MASS_ONE = float(1 << 32)  # integer mass of the best token; 2**17 tokens of that mass still sum far below 2**63
_NOISE_ELEMENTS = 1 << 23  # noise drawn at once: 64 MiB an intermediate
NUM_CANDIDATES = 1024  # best tokens looked at before a whole row is sorted


def choose_tokens(
    logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, drafts: Drafts | None
) -> torch.Tensor:
    logits = edit(logits, positions, rows, table, drafts)
    best, tokens = logits.max(dim=-1)
    lines = table.temperature.index_select(0, rows).nonzero()[:, 0]
    if len(lines):
        mine, at = rows.index_select(0, lines), positions.index_select(0, lines)
        scaled = restrict(scale(logits.index_select(0, lines), mine, table), mine, table)
        seeds = table.seeds.index_select(0, mine)
        drawn = draw(scaled, seeds, at)
        if drafts is not None and drafts.probs is not None:
            drawn = _accept_by_ratio(scaled, drawn, seeds, at, mine, lines, drafts)
        tokens.index_copy_(0, lines, drawn)
    return torch.where(best.isfinite(), tokens, -1)


def draft_tokens(
    logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, probs: torch.Tensor | None
) -> torch.Tensor:
    best, tokens = logits.max(dim=-1)
    lines = table.temperature.index_select(0, rows).nonzero()[:, 0]
    if len(lines):
        mine = rows.index_select(0, lines)
        scaled, seeds = scale(logits.index_select(0, lines), mine, table), table.seeds.index_select(0, mine)
        if probs is not None:
            probs.index_copy_(0, mine, scaled.softmax(dim=-1))
            seeds = other_seeds(seeds, _DRAFT)
        tokens.index_copy_(0, lines, draw(scaled, seeds, positions.index_select(0, lines)))
    return torch.where(best.isfinite(), tokens, 0)


def draw(scaled: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw from softmax(scaled), FP32 [r, V], by adding Gumbel noise and taking the best; int64 [r]."""
    rows = max(1, _NOISE_ELEMENTS // scaled.shape[1])  # bounds the noise's workspace
    parts = zip(scaled.split(rows), seeds.split(rows), positions.split(rows))
    return torch.cat([(part + gumbel_noise(keys, at, part.shape[1])).argmax(dim=-1) for part, keys, at in parts])


def scale(logits: torch.Tensor, rows: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    """Logits after temperature, FP32 [r, V], the best at 0: no temperature can make it overflow."""
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    return scaled.div_(table.temperature.index_select(0, rows)[:, None])


# ---- ratio acceptance -------------------------------------------------------------------------------------------


def _accept_by_ratio(
    scaled: torch.Tensor,
    drawn: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    lines: torch.Tensor,
    drafts: Drafts,
) -> torch.Tensor:
    """`drawn`, with the tokens of lines that verify a draft put in: the draft, or what replaces it; all [r], lines ascending.

    A token that replaces a draft is never the draft itself, so that counting equal tokens counts the accepted ones.
    """
    query_len = drafts.tokens.shape[1] + 1
    sequence, index = lines // query_len, lines % query_len
    verified = (sequence < len(drafts.tokens)).nonzero()[:, 0]
    verified = verified[index[verified] < drafts.counts[sequence[verified]]]
    for part in verified.split(max(1, _NOISE_ELEMENTS // scaled.shape[1])):
        keys, at = seeds[part], positions[part]
        draft, p = drafts.tokens[sequence[part], index[part]], scaled[part].softmax(dim=-1)
        assert drafts.probs is not None
        q = drafts.probs[rows[part], index[part]]
        of_draft = draft[:, None]
        taken = uniform_noise(other_seeds(keys, _ACCEPT), at, 1) * q.gather(1, of_draft) < p.gather(1, of_draft)
        residual = p.sub_(q).clamp_(min=0)
        taken |= residual.amax(dim=-1, keepdim=True) == 0  # p is q but for rounding
        replaced = draw(residual.log_(), other_seeds(keys, _RESIDUAL), at)
        drawn = drawn.index_copy(0, part, torch.where(taken[:, 0], draft, replaced))
    return drawn


# ---- logits -----------------------------------------------------------------------------------------------------


def edit(
    logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, drafts: Drafts | None
) -> torch.Tensor:
    """Everything that comes before temperature: penalties, single logits, masks. A copy if a line has any of them."""
    penalised = _penalised(rows, table).nonzero()[:, 0]
    num_edits, masked = table.num_edits.index_select(0, rows), table.masked.index_select(0, rows).nonzero()[:, 0]
    most = int(num_edits.max()) if len(rows) else 0
    if not (len(penalised) or len(masked) or most):
        return logits
    logits = logits.clone()
    if len(penalised):
        mine = rows.index_select(0, penalised)
        history = _with_drafts(table.history.index_select(0, mine), penalised, drafts)
        factors = (t.index_select(0, mine) for t in (table.repetition, table.presence, table.frequency))
        logits.index_copy_(0, penalised, penalize(logits.index_select(0, penalised), history, *factors))
    if most:
        tokens, values, until = (
            t[:, :most].index_select(0, rows) for t in (table.edit_tokens, table.edit_values, table.edit_until)
        )
        used = torch.arange(most, device=rows.device) < num_edits[:, None]
        logits.scatter_add_(1, tokens.long(), torch.where(used & (positions[:, None] < until), values, 0.0))
    if len(masked):
        allowed = unpack_mask(table.masks.index_select(0, rows.index_select(0, masked)), logits.shape[1])
        logits.index_copy_(0, masked, logits.index_select(0, masked).masked_fill_(~allowed, -torch.inf))
    return logits


def penalize(
    logits: torch.Tensor, history: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> torch.Tensor:
    """Penalties of [r, V] logits, by each row's factors [r] and history [r, V].

    repetition divides positive and multiplies negative logits of tokens seen in prompt or output; presence and frequency
    subtract once, and once per occurrence, for generated tokens.
    """
    factor, count = repetition[:, None], history & _COUNT
    logits = torch.where(history != 0, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - frequency[:, None] * count - presence[:, None] * (count > 0)


def _penalised(rows: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    """Whether lines of these rows have penalties, bool [n]."""
    repetition, presence, frequency = (t.index_select(0, rows) for t in (table.repetition, table.presence, table.frequency))
    return (repetition != 1) | (presence != 0) | (frequency != 0)


def _with_drafts(history: torch.Tensor, lines: torch.Tensor, drafts: Drafts | None) -> torch.Tensor:
    """history [r, V] of some lines, with the drafts before each of them counted."""
    if drafts is None or not len(drafts.tokens):
        return history
    query_len = drafts.tokens.shape[1] + 1
    sequence, index = (lines // query_len).clamp(max=len(drafts.tokens) - 1), lines % query_len
    index = torch.where(lines < len(drafts.tokens) * query_len, index, 0)
    before = torch.arange(query_len - 1, device=lines.device) < index[:, None]
    return history.scatter_add_(1, drafts.tokens.index_select(0, sequence), before.to(torch.int32))


def unpack_mask(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool [r, vocab] from packed int32 [r, words]; token t is bit t % 32 of word t // 32."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]


# ---- filters ----------------------------------------------------------------------------------------------------


def restrict(scaled: torch.Tensor, rows: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    """Set what min_p, then top_k, then top_p drop to -inf, in place.

    scaled: FP32 [r, V], logits after temperature with the best at 0. A token survives top_k when fewer than k tokens
    are better, and top_p when the better tokens of the set so far hold less than top_p of that set's mass: the best token
    always survives, and equal tokens share their fate.
    """
    min_p, top_k, top_p = (t.index_select(0, rows) for t in (table.min_p, table.top_k, table.top_p))
    vocab = scaled.shape[1]
    scaled.masked_fill_(scaled < min_p.log()[:, None], -torch.inf)
    lines = ((top_k < vocab) | top_p.isfinite()).nonzero()[:, 0]
    if not len(lines):
        return scaled
    some, top_k, top_p = scaled.index_select(0, lines), top_k.index_select(0, lines), top_p.index_select(0, lines)
    limited = top_k < vocab
    few = NUM_CANDIDATES if not bool(limited.all()) else 1
    few = min(max(few, int(torch.where(limited, top_k, 1).max())), vocab)
    threshold, complete = _threshold(some, top_k, top_p, few)
    if not bool(complete.all()):
        threshold, _ = _threshold(some, top_k, top_p, vocab)
    return scaled.index_copy_(0, lines, some.masked_fill_(some < threshold, -torch.inf))


def _threshold(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest logit that top_k and top_p keep, FP32 [r, 1], from the best candidates of each row.

    Also whether the border lies within the candidates, bool [r]; always true when they are the whole row.
    """
    vocab = scaled.shape[1]
    best = scaled.sort(dim=-1, descending=True).values if num_candidates == vocab else scaled.topk(num_candidates).values
    within_k = torch.arange(num_candidates, device=scaled.device) < top_k[:, None]
    kth = best.gather(1, (top_k[:, None].long() - 1).clamp(max=num_candidates - 1))
    # The top_k set's mass counts tokens equal to the k-th best, which all stay. Rows without top_k keep everything.
    no_top_k = top_k[:, None] >= vocab
    kept = torch.where(no_top_k | (scaled >= kth), _mass(scaled), 0)
    total = kept.sum(-1, keepdim=True)
    mass = _mass(best)
    before = mass.cumsum(-1) - mass
    within_p = before.double() < top_p[:, None] * total.double()
    num_kept = (within_k & within_p).sum(-1, keepdim=True)
    threshold = best.gather(1, (num_kept - 1).clamp(min=0))
    return threshold, ~no_top_k[:, 0] | (num_kept[:, 0] < num_candidates) | (num_candidates == vocab)


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
