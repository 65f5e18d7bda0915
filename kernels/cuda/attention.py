"""Prefill attention through torch's fused kernels: cuDNN for BF16 (q and k of 192, v of 128 run at full speed), plain
products for FP32, whose use is exactness."""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from kernels.cuda.elementwise import merge_attention

_BF16_MAX_DIM = 256  # cuDNN's limit on Hopper


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_lens_q: torch.Tensor,
    cu_lens_k: torch.Tensor,
    *,
    max_len_q: int,
    max_len_k: int,
    softmax_scale: float,
    causal: bool,
    lens_q: list[int] | None = None,
    lens_k: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.prefill_attention. One fused call a sequence; several sequences without host lengths have theirs read back."""
    if lens_q is not None and lens_k is not None:
        bounds_q, bounds_k = ([0, *accumulate(lens)] for lens in (lens_q, lens_k))
    elif cu_lens_q.shape[0] == 2 and (max_len_q, max_len_k) == (q.shape[0], k.shape[0]):
        bounds_q, bounds_k = [0, q.shape[0]], [0, k.shape[0]]
    else:
        bounds_q, bounds_k = torch.stack((cu_lens_q, cu_lens_k)).tolist()
    if len(bounds_q) == 2:
        only = _one_sequence(q, k, v, softmax_scale, causal)
        if only is not None and only[0].shape[0] == q.shape[0]:  # every row sees a key: nothing to fill or to put together
            return only[0].contiguous(), only[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[1]), -math.inf, device=q.device)
    for i in range(len(bounds_q) - 1):
        rows, keys = slice(bounds_q[i], bounds_q[i + 1]), slice(bounds_k[i], bounds_k[i + 1])
        part = _one_sequence(q[rows], k[keys], v[keys], softmax_scale, causal)
        if part is not None:
            seen = part[0].shape[0]  # the last rows; earlier ones see no key
            out[bounds_q[i + 1] - seen : bounds_q[i + 1]], lse[bounds_q[i + 1] - seen : bounds_q[i + 1]] = part
    return out, lse


def _one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows with a visible key of one sequence, or None. Causal rows are aligned at the end: the last row sees all keys."""
    queries, keys = q.shape[0], k.shape[0]
    if queries == 0 or keys == 0:
        return None
    if not causal:
        return _fused(q, k, v, scale, causal=False)
    if queries >= keys:
        return _fused(q[queries - keys :], k, v, scale, causal=True)
    # The fused kernels align causality at the first row, so the rectangle before the square is a part of its own.
    before = keys - queries
    square = _fused(q, k[before:], v[before:], scale, causal=True)
    return merge_attention(*_fused(q, k[:before], v[:before], scale, causal=False), *square)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Square causal or full attention of one sequence; out [Tq, H, Dv], lse FP32 [Tq, H]."""
    qh, kh, vh = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if q.dtype is torch.bfloat16 and max(q.shape[2], v.shape[2]) <= _BF16_MAX_DIM and q.shape[2] % 8 == v.shape[2] % 8 == 0:
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            qh, kh, vh, None, True, 0.0, causal, False, scale=scale
        )  # out, logsumexp, then bookkeeping
        return result[0][0].transpose(0, 1), result[1].reshape(q.shape[1], q.shape[0]).transpose(0, 1).contiguous()
    return _plain(qh[0], kh[0], vh[0], scale, causal)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, T, D] operands, FP32 arithmetic, a slice of query rows at a time so that logits stay under 64 M entries."""
    heads, queries, _ = q.shape
    keys = k.shape[1]
    step = max(1, (64 << 20) // (heads * keys))
    outs, lses = [], []
    columns = torch.arange(keys, device=q.device)
    for begin in range(0, queries, step):
        logits = torch.matmul(q[:, begin : begin + step].float(), k.float().transpose(1, 2)) * scale
        if causal:
            rows = torch.arange(begin, begin + logits.shape[1], device=q.device)
            logits.masked_fill_(columns[None, :] > rows[:, None], -math.inf)
        lse = torch.logsumexp(logits, -1)
        outs.append(torch.matmul(torch.exp(logits - lse.unsqueeze(-1)), v.float()))
        lses.append(lse)
    return torch.cat(outs, 1).transpose(0, 1).to(q.dtype), torch.cat(lses, 1).transpose(0, 1).contiguous()
