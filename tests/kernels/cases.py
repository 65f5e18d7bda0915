"""Attention problems and float64 oracles that every decode kernel test and benchmark shares.

A problem is built from real-valued latents, keys and queries, stored in a cache format by the rules of kernels/layout.py,
so an error can be taken against the stored values (P quantization and accumulation only) or against the real ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kernels.layout import AMAX_FLOOR, BLOCK_SIZE, FP8, FP8_MAX, CacheFormat, LatentCache, LatentQuery

DIM, ROPE = 512, 64
SOFTMAX_SCALE = (128 + 64) ** -0.5
P_BLOCK = 128  # tokens that share one scale of P in the Hopper kernel


@dataclass(frozen=True)
class Problem:
    """Arguments of ops.mla_decode, and the real values behind them where they are kept (tests of end-to-end accuracy)."""

    query: LatentQuery
    cache: LatentCache
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_query: torch.Tensor | None = None
    causal: bool = True
    softmax_scale: float = SOFTMAX_SCALE

    @property
    def shape(self) -> tuple[int, int, int]:
        b, s, h, _ = self.query.content.shape
        return b, s, h

    def visible(self, sequence: int, row: int) -> int:
        """Tokens that query row `row` of a sequence sees; 0 for rows past num_query."""
        live = self.shape[1] if self.num_query is None else int(self.num_query[sequence])
        if row >= live:
            return 0
        length = int(self.seq_lens[sequence])
        return max(0, length - (live - 1 - row) if self.causal else length)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [..., C] and FP32 scales [...] of x."""
    scale = x.float().abs().amax(-1).clamp(min=AMAX_FLOOR) / FP8_MAX
    return (x.float() / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def store_query(content: torch.Tensor, rope: torch.Tensor, fmt: CacheFormat) -> LatentQuery:
    if fmt is not CacheFormat.FP8:
        return LatentQuery(content.to(fmt.content_dtype), rope.to(fmt.rope_dtype), None)
    codes, scale = quantize(content)
    return LatentQuery(codes, (rope.float() / scale.unsqueeze(-1)).to(torch.bfloat16), scale)


def store_cache(content: torch.Tensor, rope: torch.Tensor, fmt: CacheFormat) -> LatentCache:
    """Blocks of real values [N, 64, C] and [N, 64, R] in a cache format."""
    stored = store_query(content, rope, fmt)
    return LatentCache(stored.content, stored.rope, stored.scale)


def random_problem(
    lens: list[int],
    heads: int,
    query_len: int = 1,
    *,
    fmt: CacheFormat = CacheFormat.FP8,
    v_mean: float = 0.0,
    q_std: float = 1.0,
    rope_gain: float = 1.0,
    num_query: list[int] | None = None,
    causal: bool = True,
    table_width: int | None = None,
    seed: int = 0,
    device: str = "cuda",
) -> Problem:
    """Normal data; every sequence owns random distinct blocks of a pool, table tails are -1 and unused blocks hold NaN.

    q_std 1 gives logits of about 1.7 nats standard deviation.
    """
    gen = torch.Generator(device=device).manual_seed(seed)
    blocks = [-(-n // BLOCK_SIZE) for n in lens]
    width = table_width or max(1, max(blocks))
    total = sum(blocks) + 3
    content = torch.randn(total, BLOCK_SIZE, DIM, device=device, generator=gen) + v_mean
    rope = torch.randn(total, BLOCK_SIZE, ROPE, device=device, generator=gen) * rope_gain
    order = torch.randperm(total, generator=gen, device=device).int()
    table = torch.full((len(lens), width), -1, dtype=torch.int32, device=device)
    start = 0
    for i, n in enumerate(blocks):
        table[i, :n] = order[start : start + n]
        start += n
    cache = store_cache(content, rope, fmt)
    poison(cache, order[start:].long())
    for i, n in enumerate(lens):
        if n % BLOCK_SIZE:
            poison_tail(cache, int(table[i, n // BLOCK_SIZE]), n % BLOCK_SIZE)
    shape = (len(lens), query_len, heads)
    q_content = torch.randn(*shape, DIM, device=device, generator=gen) * q_std
    q_rope = torch.randn(*shape, ROPE, device=device, generator=gen) * q_std
    return Problem(
        store_query(q_content, q_rope, fmt), cache, table, torch.tensor(lens, dtype=torch.int32, device=device),
        None if num_query is None else torch.tensor(num_query, dtype=torch.int32, device=device), causal,
    )  # fmt: skip


def poison(cache: LatentCache, blocks: torch.Tensor) -> None:
    """NaN in every byte pattern of whole blocks."""
    cache.content.view(torch.uint8)[blocks] = 0xFF
    cache.rope[blocks] = math.nan
    if cache.scale is not None:
        cache.scale[blocks] = math.nan


def poison_tail(cache: LatentCache, block: int, offset: int) -> None:
    """NaN in the tokens of one block from `offset` on."""
    cache.content.view(torch.uint8)[block, offset:] = 0xFF
    cache.rope[block, offset:] = math.nan
    if cache.scale is not None:
        cache.scale[block, offset:] = math.nan


def strided(cache: LatentCache, layers: int = 3, layer: int = 1) -> LatentCache:
    """The same cache as one layer of a pool that interleaves layers block by block; the other layers hold NaN."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        pool = (
            torch.full((x.shape[0], layers, *x.shape[1:]), 0xFF, dtype=torch.uint8, device=x.device) if x.dtype == FP8 else None
        )
        if pool is None:
            pool = torch.full((x.shape[0], layers, *x.shape[1:]), math.nan, dtype=x.dtype, device=x.device)
        else:
            pool = pool.view(FP8)
        view = pool[:, layer]
        view.view(torch.uint8).copy_(x.view(torch.uint8)) if x.dtype == FP8 else view.copy_(x)
        return view

    return LatentCache(spread(cache.content), spread(cache.rope), None if cache.scale is None else spread(cache.scale))


def _sequence(p: Problem, i: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Content [L, C], rope [L, R] as stored and scale [L] of one sequence, float64."""
    ids = p.block_table[i, : -(-length // BLOCK_SIZE)].long()
    content = p.cache.content[ids].to(torch.float64).flatten(0, 1)[:length]
    rope = p.cache.rope[ids].to(torch.float64).flatten(0, 1)[:length]
    if p.cache.scale is None:
        return content, rope, torch.ones(length, dtype=torch.float64, device=content.device)
    return content, rope, p.cache.scale[ids].to(torch.float64).flatten()[:length]


def attend(p: Problem, *, p_block: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 on the stored values: out [B, S, H, C], lse [B, S, H].

    p_block: also quantize P to E4M3 with an exact scale per row and block of that many tokens, V's scale folded in. That is
    what an FP8 kernel may lose, and nothing else. The output's sums stay exact; the LSE is that of the quantized P.
    """
    b, s, h = p.shape
    device = p.query.content.device
    out = torch.zeros(b, s, h, DIM, dtype=torch.float64, device=device)
    lse = torch.full((b, s, h), -math.inf, dtype=torch.float64, device=device)
    for i in range(b):
        limits = [p.visible(i, r) for r in range(s)]
        if max(limits) == 0:
            continue
        content, rope, scale = _sequence(p, i, max(limits))
        for r, n in enumerate(limits):
            if n == 0:
                continue
            q_scale = 1.0 if p.query.scale is None else p.query.scale[i, r].to(torch.float64)[:, None]
            logits = p.query.content[i, r].to(torch.float64) @ content[:n].T + p.query.rope[i, r].to(torch.float64) @ rope[:n].T
            logits *= q_scale * scale[:n] * p.softmax_scale
            lse[i, r] = logits.logsumexp(-1)
            if p_block is None:
                out[i, r] = logits.softmax(-1) @ (content[:n] * scale[:n, None])
            else:
                weights = _quantized_p(logits, scale[:n], p_block)
                out[i, r] = weights @ content[:n]
                lse[i, r] += (weights / scale[:n]).sum(-1).log()
    return out, lse


def _quantized_p(logits: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Normalized weights [H, L] (V's scale folded in) after quantization per block."""
    heads, n = logits.shape
    pad = -n % block
    y = torch.nn.functional.pad(logits + scale.log(), (0, pad), value=-math.inf).view(heads, -1, block)
    top = y.amax(-1, keepdim=True)
    codes = ((y - top).exp() * FP8_MAX).float().to(FP8).to(torch.float64)
    weights = (codes / FP8_MAX * (top - logits.logsumexp(-1)[:, None, None]).exp()).view(heads, -1)
    return weights[:, :n]


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """‖value - truth‖ / ‖truth‖ over everything; NaN never passes."""
    error = float((value.to(torch.float64) - truth).norm() / truth.norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def lse_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Worst |difference| over max(1, |truth|); rows without keys must be -inf in both."""
    empty = truth == -math.inf
    if not bool(((value == -math.inf) == empty).all()):
        return math.inf
    error = ((value.to(torch.float64) - truth).abs() / truth.abs().clamp(min=1.0))[~empty]
    return 0.0 if error.numel() == 0 else float(error.max().nan_to_num(math.inf))


def with_lengths(p: Problem, lens: list[int]) -> Problem:
    return replace(p, seq_lens=torch.tensor(lens, dtype=torch.int32, device=p.seq_lens.device))
