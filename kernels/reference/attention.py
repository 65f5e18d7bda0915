"""Expanded attention of prefill chunks, and the merge of partial results by their lse."""

from __future__ import annotations

from itertools import accumulate

import torch

_SCORES_PER_TILE = 1 << 24  # bounds the score matrix to 64 MiB


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
    heads = q.shape[1]
    out = q.new_zeros(q.shape[0], heads, v.shape[2])
    lse = torch.full((q.shape[0], heads), float("-inf"), device=q.device)
    rows_per_tile = max(1, _SCORES_PER_TILE // (heads * max(1, max_len_k)))
    edges_q = cu_lens_q.tolist() if lens_q is None else [0, *accumulate(lens_q)]
    edges_k = cu_lens_k.tolist() if lens_k is None else [0, *accumulate(lens_k)]
    for q0, q1, k0, k1 in zip(edges_q, edges_q[1:], edges_k, edges_k[1:]):
        keys, values = k[k0:k1].transpose(0, 1), v[k0:k1].transpose(0, 1)
        before = (k1 - k0) - (q1 - q0)  # keys that precede the first query
        for row in range(q0, q1, rows_per_tile):
            end = min(row + rows_per_tile, q1)
            visible = min(k1 - k0, max(0, before + end - q0)) if causal else k1 - k0
            if visible == 0:
                continue
            scores = _scores(q[row:end].transpose(0, 1), keys[:, :visible]) * softmax_scale
            if causal:
                position = torch.arange(row - q0 + before, end - q0 + before, device=q.device)
                hidden = torch.arange(visible, device=q.device) > position.unsqueeze(1)
                scores.masked_fill_(hidden, float("-inf"))
            tile_lse = scores.logsumexp(dim=-1)
            # A row that sees nothing subtracts 0 instead of -inf, so its weights are 0 and not NaN.
            p = (scores - tile_lse.masked_fill(tile_lse == float("-inf"), 0.0).unsqueeze(-1)).exp_()
            out[row:end] = torch.matmul(p.to(v.dtype), values[:, :visible]).transpose(0, 1)
            lse[row:end] = tile_lse.t()
    return out, lse


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[H, Tq, D] x [H, Tk, D] -> FP32 [H, Tq, Tk]."""
    return torch.matmul(q.float(), k.float().transpose(1, 2))


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    empty = float("-inf")
    lse_a, lse_b = (lse.masked_fill(lse == float("inf"), empty) for lse in (lse_a, lse_b))
    top = torch.maximum(lse_a, lse_b)
    safe_top = top.masked_fill(top == empty, 0.0)
    weight_a, weight_b = (lse_a - safe_top).exp(), (lse_b - safe_top).exp()
    total = weight_a + weight_b
    merged = torch.zeros_like(out_a, dtype=torch.float32)
    for out, weight in (out_a, weight_a), (out_b, weight_b):
        share = (weight / total.clamp_min(torch.finfo(torch.float32).tiny)).unsqueeze(-1)
        merged += torch.where(share > 0, out.float() * share, 0.0)  # an empty part may hold anything
    return merged.to(out_a.dtype), total.log() + safe_top
