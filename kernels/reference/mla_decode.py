"""Absorbed MLA attention against the paged latent cache, in three forms with one meaning.

exact_attention   Eq. 5 on dequantized values; what quantizing P is measured against
tiled_attention   Algorithm 1 block by block, the oracle of the Hopper kernel (Eq. 12, 13)
mla_decode        the same quantization points as tiled_attention, whole sequences at a time: the CPU backend

The FP8 forms keep sigma_P in the exponent: with y_t = x_t + log2(scale_t), x in base 2, and r the maximum of y over a
block, P_t = e4m3(448 * 2^(y_t - r)), so the largest code of a block is 448 (the paper's sigma_P = max / 448) and no
ratio of scales is ever formed. A block enters the sums with weight 2^(r - R), R the running maximum of r. The row sums are
those of the quantized P, so that a value all tokens share comes out as it went in; P's rounding is in the lse.
"""

from __future__ import annotations

import math

import torch

from kernels.layout import BLOCK_SIZE, FP8, FP8_MAX, CacheFormat, DecodePlan, LatentCache, LatentQuery
from kernels.reference.latent import E4M3_AS_HALF, e4m3_as_half

_LOWEST = -1e30  # finite stand-in for the maximum of an empty block
_LN2 = math.log(2.0)
_TOKENS_AT_ONCE = 1024  # keeps the gathered latents (2 MiB in FP32) inside a CPU's cache


def plan_decode(
    seq_lens: torch.Tensor, *, query_len: int, num_heads: int, fmt: CacheFormat, batch_invariant: bool = False
) -> DecodePlan:
    return DecodePlan(batch_invariant=batch_invariant)


def visible_lengths(seq_lens: torch.Tensor, num_query: torch.Tensor | None, query_len: int, causal: bool) -> torch.Tensor:
    """Tokens that each query row sees, int32 [B, S]; 0 for rows past num_query."""
    row = torch.arange(query_len, device=seq_lens.device)
    live = torch.full_like(seq_lens, query_len) if num_query is None else num_query
    behind = (live.unsqueeze(1) - 1 - row) if causal else torch.zeros_like(row).expand(len(seq_lens), -1)
    visible = (seq_lens.unsqueeze(1) - behind).clamp_min(0)
    return torch.where(row < live.unsqueeze(1), visible, 0)


# ---- vectorised ---------------------------------------------------------------------------------------------------


def mla_decode(
    query: LatentQuery,
    cache: LatentCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_query: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    causal: bool,
    plan: DecodePlan,
    out_dtype: torch.dtype,
    p_block: int = BLOCK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of sequences share a few large products; p_block is the block of P's quantization (64 or 128)."""
    b, s, h, c = query.content.shape
    visible = visible_lengths(seq_lens, num_query, s, causal)
    lengths = seq_lens.tolist()
    attend = _attend_exact if cache.scale is None else _attend_fp8
    group = max(1, _TOKENS_AT_ONCE // max(1, max(lengths, default=0)))
    outs, lses = [], []
    for first in range(0, b, group):
        rows = slice(first, first + group)
        longest = max(lengths[rows])
        padded = max(1, -(-longest // p_block)) * p_block
        blocks = _blocks(block_table[rows], seq_lens[rows], padded)
        out, lse = attend(_rows(query, rows), cache, blocks, seq_lens[rows], visible[rows], softmax_scale, p_block)
        outs.append(out)
        lses.append(lse)
    if not outs:
        device = query.content.device
        return torch.zeros(b, s, h, c, dtype=out_dtype, device=device), torch.zeros(b, s, h, device=device)
    return _joined(outs).to(out_dtype), _joined(lses)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(query: LatentQuery, rows: slice) -> LatentQuery:
    return LatentQuery(query.content[rows], query.rope[rows], None if query.scale is None else query.scale[rows])


def _blocks(block_table: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Block ids of the first `num_tokens` tokens, int64 [B, num_tokens / 64]; 0 past a sequence's length."""
    start = torch.arange(0, num_tokens, BLOCK_SIZE, device=block_table.device)
    table = block_table[:, : len(start)]
    if table.shape[1] < len(start):  # p_block 128 may round past the table
        table = torch.nn.functional.pad(table, (0, len(start) - table.shape[1]))
    return torch.where(start < seq_lens.unsqueeze(1), table, 0).long()


def _gather(part: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Cache blocks [N, 64, ...] by id [B, n] -> [B, n * 64, ...]."""
    return part.index_select(0, blocks.flatten()).view(blocks.shape[0], blocks.shape[1] * BLOCK_SIZE, *part.shape[2:])


def _past_the_end(lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """bool [..., L], True from each length on."""
    return torch.arange(num_tokens, device=lengths.device) >= lengths.unsqueeze(-1)


def _attend_exact(
    query: LatentQuery,
    cache: LatentCache,
    blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    visible: torch.Tensor,
    softmax_scale: float,
    p_block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    b, s, h, c = query.content.shape
    keys, rope = _gather(cache.content, blocks).float(), _gather(cache.rope, blocks).float()
    for i, length in enumerate(seq_lens.tolist()):
        keys[i, length:].zero_()  # stale slots may hold NaN, and 0 * NaN would reach the output
    scores = torch.bmm(query.rope.flatten(1, 2).float(), rope.transpose(1, 2))
    scores.baddbmm_(query.content.flatten(1, 2).float(), keys.transpose(1, 2)).mul_(softmax_scale)
    scores.view(b, s, h, -1).masked_fill_(_past_the_end(visible, keys.shape[1]).unsqueeze(2), float("-inf"))
    top = scores.amax(dim=-1, keepdim=True).clamp_min(_LOWEST)
    p = scores.sub_(top).exp_()
    total = p.sum(dim=-1, keepdim=True)
    out = torch.bmm(p, keys) / total.clamp_min(torch.finfo(torch.float32).tiny)
    return out.view(b, s, h, c), (top + total.log()).view(b, s, h)


def _attend_fp8(
    query: LatentQuery,
    cache: LatentCache,
    blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    visible: torch.Tensor,
    softmax_scale: float,
    p_block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert query.scale is not None and cache.scale is not None
    b, s, h, c = query.content.shape
    # E4M3 codes of the cache stay divided by 256; the query and the output carry the factor.
    keys = e4m3_as_half(_gather(cache.content.view(torch.int8), blocks))
    rope, key_scale = _gather(cache.rope, blocks).float(), _gather(cache.scale, blocks)
    key_scale.masked_fill_(_past_the_end(seq_lens, keys.shape[1]), 1.0)
    content = e4m3_as_half(query.content.flatten(1, 2)).mul_(E4M3_AS_HALF * E4M3_AS_HALF)
    scores = torch.bmm(query.rope.flatten(1, 2).float(), rope.transpose(1, 2))
    scores.baddbmm_(content, keys.transpose(1, 2))

    row_scale = query.scale.flatten(1, 2).unsqueeze(-1) * (softmax_scale / _LN2)
    y = scores.mul_(key_scale.unsqueeze(1)).mul_(row_scale).add_(key_scale.log2().unsqueeze(1))
    y.view(b, s, h, -1).masked_fill_(_past_the_end(visible, keys.shape[1]).unsqueeze(2), float("-inf"))
    y = y.unflatten(-1, (-1, p_block))
    block_top = y.amax(dim=-1, keepdim=True).clamp_min(_LOWEST)
    top = block_top.amax(dim=-2, keepdim=True)
    weight = torch.exp2(block_top - top)
    p = e4m3_as_half(y.sub_(block_top).exp2_().mul_(FP8_MAX).to(FP8)).mul_(weight)
    total = p.div(key_scale.view(b, 1, -1, p_block)).sum(dim=(-2, -1))  # like p divided by E4M3_AS_HALF
    p = p.flatten(-2)
    inverse = (E4M3_AS_HALF / total).masked_fill_(total == 0.0, 0.0)  # a row without a token gives zeros
    out = torch.bmm(p, keys).mul_(inverse.unsqueeze(-1))
    lse = _LN2 * (top.flatten(-3).view(b, s * h) + math.log2(E4M3_AS_HALF / FP8_MAX) + total.log2())
    return out.view(b, s, h, c), lse.view(b, s, h)


# ---- oracles ------------------------------------------------------------------------------------------------------


def _tokens(cache: LatentCache, block_table: torch.Tensor, sequence: int, length: int) -> tuple[torch.Tensor, ...]:
    """Stored content [L, C] and RoPE [L, R] in FP32, and scales [L], of one sequence's first `length` tokens."""
    ids = block_table[sequence, : -(-length // BLOCK_SIZE)].long()
    content = cache.content[ids].float().flatten(0, 1)[:length]
    rope = cache.rope[ids].float().flatten(0, 1)[:length]
    scale = torch.ones(length, device=content.device) if cache.scale is None else cache.scale[ids].flatten()[:length]
    return content, rope, scale


def exact_attention(
    query: LatentQuery,
    cache: LatentCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_query: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    causal: bool,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 5 on the real values that query and cache stand for, computed in `dtype`; P is not quantized."""
    b, s, h, c = query.content.shape
    visible = visible_lengths(seq_lens, num_query, s, causal).tolist()
    out = torch.zeros(b, s, h, c, dtype=dtype, device=query.content.device)
    lse = torch.full((b, s, h), float("-inf"), dtype=dtype, device=query.content.device)
    scale_q = torch.ones(b, s, h, 1, device=out.device) if query.scale is None else query.scale.unsqueeze(-1)
    for i in range(b):
        for j in range(s):
            if visible[i][j] == 0:
                continue
            content, rope, scale = (t.to(dtype) for t in _tokens(cache, block_table, i, visible[i][j]))
            keys, key_rope = content * scale[:, None], rope * scale[:, None]
            q_content, q_rope = (t[i, j].to(dtype) * scale_q[i, j].to(dtype) for t in (query.content, query.rope))
            scores = (q_content @ keys.T + q_rope @ key_rope.T) * softmax_scale
            lse[i, j] = scores.logsumexp(dim=-1)
            out[i, j] = scores.softmax(dim=-1) @ keys
    return out, lse


def tiled_attention(
    query: LatentQuery,
    cache: LatentCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_query: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    causal: bool,
    block: int = BLOCK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 on an FP8 cache, tile by tile: P is quantized per block of 64 or 128 tokens, P.V and all sums are FP32.

    Returns (out FP32 [B, S, H, C], lse FP32 [B, S, H]).
    """
    assert query.scale is not None and cache.scale is not None
    b, s, h, c = query.content.shape
    visible = visible_lengths(seq_lens, num_query, s, causal).tolist()
    out = torch.zeros(b, s, h, c, device=query.content.device)
    lse = torch.full((b, s, h), float("-inf"), device=query.content.device)
    for i in range(b):
        for j in range(s):
            content, rope, scale = _tokens(cache, block_table, i, visible[i][j])
            q_content, q_rope = query.content[i, j].float(), query.rope[i, j].float()
            row_scale = query.scale[i, j] * (softmax_scale / _LN2)
            state_out = torch.zeros(h, c, device=out.device)
            state_sum = torch.zeros(h, device=out.device)
            state_top = torch.full((h,), _LOWEST, device=out.device)
            for start in range(0, visible[i][j], block):
                tile = slice(start, start + block)
                acc = q_content @ content[tile].T + q_rope @ rope[tile].T  # content first, RoPE last
                y = acc * scale[tile] * row_scale[:, None] + scale[tile].log2()
                tile_top = y.amax(dim=-1)
                p = (torch.exp2(y - tile_top[:, None]) * FP8_MAX).to(FP8).float()
                new_top = torch.maximum(state_top, tile_top)
                alpha, beta = torch.exp2(state_top - new_top), torch.exp2(tile_top - new_top)
                state_sum = alpha * state_sum + beta * (p / scale[tile]).sum(dim=-1)
                state_out = alpha[:, None] * state_out + beta[:, None] * (p @ content[tile])
                state_top = new_top
            if visible[i][j]:
                out[i, j] = state_out / state_sum[:, None]
                lse[i, j] = _LN2 * (state_top - math.log2(FP8_MAX) + state_sum.log2())
    return out, lse
