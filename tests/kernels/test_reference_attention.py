"""Prefill attention with lse, merge of parts, RoPE, norm and activation against plain formulas."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.errors import KernelContractError
from kernels.reference import attention


def plain_attention(q, k, v, scale, causal):
    """One sequence in FP64: (out [Tq, H, Dv], lse [Tq, H])."""
    q, k, v = (t.double() for t in (q, k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        offset = k.shape[0] - q.shape[0]
        hidden = torch.arange(k.shape[0]) > torch.arange(q.shape[0]).unsqueeze(1) + offset
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", p, v), lse.T


@pytest.mark.parametrize("tile", [1 << 24, 1 << 8])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_attention(causal, tile, monkeypatch) -> None:
    """Packed sequences, more keys than queries and fewer, an empty one; values are a strided view. Report N10: the
    score tile's size does not matter."""
    monkeypatch.setattr(attention, "_SCORES_PER_TILE", tile)
    lens_q, lens_k = [5, 1, 7, 3], [5, 40, 4, 0]
    q, kv = torch.randn(sum(lens_q), 3, 20), torch.randn(sum(lens_k), 3, 40)
    k, v = kv[..., :20], kv[..., 20:36]
    cu = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lens_q, lens_k)]
    sizes = {"max_len_q": max(lens_q), "max_len_k": max(lens_k), "softmax_scale": 0.3, "causal": causal}
    out, lse = ops.prefill_attention(q, k, v, *cu, **sizes)
    again = ops.prefill_attention(q, k, v, *cu, **sizes, lens_q=lens_q, lens_k=lens_k)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), "the same lengths from the host"
    with pytest.raises(KernelContractError, match="lens_k must be the lengths of 4 sequences of 49 tokens"):
        ops.prefill_attention(q, k, v, *cu, **sizes, lens_q=lens_q, lens_k=[5, 40, 4])
    for i in range(4):
        rows, keys = slice(cu[0][i], cu[0][i + 1]), slice(cu[1][i], cu[1][i + 1])
        want_out, want_lse = plain_attention(q[rows], k[keys], v[keys], 0.3, causal)
        assert torch.allclose(out[rows].double(), want_out, atol=1e-5)
        assert torch.allclose(lse[rows].double(), want_lse, atol=1e-5)


def test_merge_of_parts_equals_the_whole() -> None:
    q, k, v = torch.randn(4, 2, 8), torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    want = plain_attention(q, k, v, 0.5, False)
    parts = [tuple(t.float() for t in plain_attention(q, k[s], v[s], 0.5, False)) for s in (slice(0, 11), slice(11, 30))]
    out, lse = ops.merge_attention(*parts[0], *parts[1])
    assert torch.allclose(out.double(), want[0], atol=1e-5) and torch.allclose(lse.double(), want[1], atol=1e-5)


@pytest.mark.parametrize("empty", [float("-inf"), float("inf")])
def test_merge_of_empty_parts(empty) -> None:
    """Report N09: an empty part of either sign weighs 0, whatever its output holds; two give zeros and -inf."""
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    nothing, none = torch.full_like(out, float("nan")), torch.full_like(lse, empty)
    for merged in (ops.merge_attention(out, lse, nothing, none), ops.merge_attention(nothing, none, out, lse)):
        assert torch.allclose(merged[0], out) and torch.allclose(merged[1], lse)
    both = ops.merge_attention(nothing, none, nothing, none)
    assert (both[0] == 0).all() and both[1].isneginf().all()


def test_merge_refuses_transposed_lse() -> None:
    """Report N11: lse is [tokens, heads], and anything else is refused."""
    out, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    with pytest.raises(ValueError, match="lse"):
        ops.merge_attention(out, lse, out, lse)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs(interleaved) -> None:
    angles = torch.rand(10, 4)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    x, positions = torch.randn(3, 2, 8), torch.tensor([9, 0, 4])
    got = ops.rope(x, positions, cos_sin, interleaved=interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    for i, (a, b) in enumerate(pairs):
        turn = torch.polar(torch.ones(3, 1), angles[positions, i].unsqueeze(1))
        want = torch.complex(x[..., a], x[..., b]) * turn
        assert torch.allclose(got[..., a], want.real, atol=1e-6) and torch.allclose(got[..., b], want.imag, atol=1e-6)
    assert torch.allclose(ops.rope(x[:, 0], positions, cos_sin, interleaved=interleaved), got[:, 0])


def test_rms_norm_adds_the_residual_first() -> None:
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.rand(32)
    got, total = ops.rms_norm(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    want = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(got, want, atol=1e-6)
    got_bf16, _ = ops.rms_norm(x.bfloat16(), weight, eps=1e-5)
    assert got_bf16.dtype is torch.bfloat16


def test_silu_and_mul() -> None:
    x = torch.randn(4, 12)
    want = x[:, :6] * torch.sigmoid(x[:, :6]) * x[:, 6:]
    assert torch.allclose(ops.silu_and_mul(x), want, atol=1e-6)
