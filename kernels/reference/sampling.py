"""The choice of tokens from logits: greedy, or a draw after temperature, min_p, top_k and top_p, by Gumbel-max.

Randomness has no state: the noise of a token is hashed from (seed, position, token id) in integer arithmetic, so a seeded
result depends on neither batch, row, rank, step nor device. Masses of top_p are integers for the same reason: their sums
do not depend on the order of addition.
"""

from __future__ import annotations

import torch

from kernels.layout import Draws, Filters

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, odd, as a signed 64-bit number
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
_MASS_ONE = float(1 << 32)  # integer mass of the best token; 2**17 tokens of that mass still sum far below 2**63
_NOISE_ELEMENTS = 1 << 23  # noise drawn at once: 64 MiB an intermediate
NUM_CANDIDATES = 1024  # best tokens looked at before a whole row is sorted


def choose_tokens(logits: torch.Tensor, positions: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    best, tokens = logits.max(dim=-1)
    if draws is not None:
        drawn = draw(logits.index_select(0, draws.rows), positions.index_select(0, draws.rows), draws)
        tokens.index_copy_(0, draws.rows, drawn)
    return torch.where(best.isfinite(), tokens, -1)


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
