"""Norms, rotary embedding, activations, prefill attention and its merge on Hopper against the reference on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import ops
from kernels.reference.linear import quantize_activations
from tests.kernels.cases import relative_error
from tests.kernels.poison import poison_free_memory

pytestmark = pytest.mark.hopper
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 0.01 if want.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("dim", [1, 96, 512, 1536, 7168])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, dim: int, with_residual: bool) -> None:
    x, residual = torch.randn(2, 7, dim).to(dtype), torch.randn(2, 7, dim).to(dtype) if with_residual else None
    weight = torch.rand(dim).to(dtype)
    want = ops.rms_norm(x, weight, eps=1e-6, residual=residual)
    got = ops.rms_norm(x.cuda(), weight.cuda(), eps=1e-6, residual=None if residual is None else residual.cuda())
    close(got[0], want[0]), close(got[1], want[1])
    wide = torch.randn(14, dim + 8).to(dtype)  # a slice of a wider projection
    close(ops.rms_norm(wide.cuda()[:, :dim], weight.cuda(), eps=1e-6)[0], ops.rms_norm(wide[:, :dim], weight, eps=1e-6)[0])


@DTYPES
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("fp32_weight", [False, True])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1536), (17, 7168), (3, 16384), (65, 144), (0, 256)])
def test_norm_with_quantization_equals_its_two_steps(
    dtype: torch.dtype, with_residual: bool, fp32_weight: bool, rows: int, dim: int
) -> None:
    x, weight = torch.randn(rows, dim, device="cuda").to(dtype), torch.rand(dim, device="cuda").add(0.5)
    weight = weight if fp32_weight else weight.bfloat16()
    residual = torch.randn(rows, dim, device="cuda").mul(4).to(dtype) if with_residual else None
    poison_free_memory()
    got, total = ops.rms_norm_quantized(x, weight, eps=1e-6, residual=residual, keep_plain=True)
    normalized, want_total = ops.rms_norm(x, weight, eps=1e-6, residual=residual)
    assert torch.equal(total, want_total) and torch.equal(got.plain, normalized)
    assert torch.equal(got.quantized.dequantize().cpu(), quantize_activations(normalized.cpu()))
    alone, _ = ops.rms_norm_quantized(x, weight, eps=1e-6, residual=residual, keep_plain=False)
    assert alone.plain is None and torch.equal(alone.quantized.data.view(torch.uint8), got.quantized.data.view(torch.uint8))
    wide = torch.randn(rows, dim + 64, device="cuda").to(dtype)  # a slice of a wider projection
    sliced, _ = ops.rms_norm_quantized(wide[:, :dim], weight, eps=1e-6, keep_plain=True)
    assert torch.equal(sliced.plain, ops.rms_norm(wide[:, :dim].contiguous(), weight, eps=1e-6)[0])


@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(dtype: torch.dtype, interleaved: bool) -> None:
    angle = torch.arange(100)[:, None] / 10000 ** (torch.arange(0, 64, 2) / 64)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1).float()
    positions = torch.randint(0, 100, (9,))
    for x in (torch.randn(9, 64).to(dtype), torch.randn(9, 5, 192).to(dtype)[..., 128:]):
        close(
            ops.rope(x.cuda(), positions.cuda(), cos_sin.cuda(), interleaved=interleaved),
            ops.rope(x, positions, cos_sin, interleaved=interleaved),
        )


@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("nope", [128, 127, 12])
def test_rope_in_place_leaves_the_rest_alone(dtype: torch.dtype, interleaved: bool, nope: int) -> None:
    """Heads that begin at 16-byte boundaries and heads that do not; more pairs than one CTA takes."""
    cos_sin, positions = torch.rand(100, 64), torch.randint(0, 100, (70,))
    x = torch.randn(70, 5, nope + 64).to(dtype)
    device = x.cuda()
    returned = ops.rope(device[..., nope:], positions.cuda(), cos_sin.cuda(), interleaved=interleaved, in_place=True)
    assert returned.data_ptr() == device[..., nope:].data_ptr()
    assert torch.equal(device[..., :nope].cpu(), x[..., :nope])
    want = ops.rope(x[..., nope:], positions, cos_sin, interleaved=interleaved)
    close(device[..., nope:], want)
    close(ops.rope(x[..., nope:].cuda(), positions.cuda(), cos_sin.cuda(), interleaved=interleaved), want)
    assert torch.equal(ops.rope(x[..., nope:], positions, cos_sin, interleaved=interleaved, in_place=True), want)


@DTYPES
@pytest.mark.parametrize(("own", "shared", "heads"), [(128, 64, 16), (24, 8, 5), (20, 12, 3), (8, 6, 2)])
def test_join_heads(dtype: torch.dtype, own: int, shared: int, heads: int) -> None:
    """Slices of wider rows, of which some are no multiples of 16 bytes."""
    x, wide = torch.randn(70, heads, own + 128).to(dtype), torch.randn(70, shared + 8).to(dtype)
    want = ops.join_heads(x[..., :own], wide[:, :shared])
    assert want.shape == (70, heads, own + shared) and torch.equal(want[:, heads - 1, own:], wide[:, :shared])
    poison_free_memory()
    assert torch.equal(ops.join_heads(x.cuda()[..., :own], wide.cuda()[:, :shared]).cpu(), want)
    assert ops.join_heads(x.cuda()[:0, :, :own], wide.cuda()[:0, :shared]).shape == (0, heads, own + shared)


@DTYPES
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 2 * 300).to(dtype) * 4
    x[0, 0, 0], x[0, 0, 1] = 100.0, -100.0
    close(ops.silu_and_mul(x.cuda()), ops.silu_and_mul(x))


@DTYPES
@pytest.mark.parametrize("dim", [128, 192, 30])
def test_merge_attention(dtype: torch.dtype, dim: int) -> None:
    """Reports N09, N10: infinities of both signs weigh nothing, NaN beside them is not used, strides may differ."""
    a, b = torch.randn(6, 4, dim).to(dtype), torch.randn(6, 4, 2 * dim).to(dtype)[..., dim:]
    la, lb = torch.randn(6, 4) * 5, torch.randn(6, 4) * 5
    la[0], lb[1], la[2], lb[2], la[3] = -math.inf, math.inf, math.inf, -math.inf, 200.0
    a[0], b[1] = math.nan, math.nan
    want = ops.merge_attention(a.nan_to_num(), la, b.nan_to_num(), lb)
    got = ops.merge_attention(a.cuda(), la.cuda(), b.cuda(), lb.cuda())
    close(got[0], want[0]), close(got[1], want[1])
    assert bool((got[0][2] == 0).all()) and bool((got[1][2] == -math.inf).all())


@DTYPES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lens", [[(300, 300)], [(128, 128), (1, 1), (65, 65)], [(64, 200), (0, 30), (7, 0), (100, 64), (1, 500)]]
)
def test_prefill_attention(dtype: torch.dtype, causal: bool, lens: list[tuple[int, int]]) -> None:
    heads = 4
    len_q, len_k = [q for q, _ in lens], [k for _, k in lens]
    q, k, v = (torch.randn(n, heads, d).to(dtype) for n, d in ((sum(len_q), 192), (sum(len_k), 192), (sum(len_k), 128)))
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (len_q, len_k))
    options = {"max_len_q": max(len_q), "max_len_k": max(len_k), "softmax_scale": 192**-0.5, "causal": causal}
    want = ops.prefill_attention(q.float(), k.float(), v.float(), cu_q, cu_k, **options)
    got = ops.prefill_attention(q.cuda(), k.cuda(), v.cuda(), cu_q.cuda(), cu_k.cuda(), **options)
    told = ops.prefill_attention(q.cuda(), k.cuda(), v.cuda(), cu_q.cuda(), cu_k.cuda(), **options, lens_q=len_q, lens_k=len_k)
    # The same lengths from the host. The fused kernel may split few queries' keys and add the parts in any order.
    assert relative_error(told[0], got[0].double()) < 2e-3
    torch.testing.assert_close(told[1], got[1], rtol=1e-4, atol=1e-4)
    assert got[0].dtype == dtype
    assert relative_error(got[0].cpu(), want[0].double()) < (0.005 if dtype == torch.bfloat16 else 1e-5)
    seen = want[1] != -math.inf
    assert bool(((got[1].cpu() != -math.inf) == seen).all())
    torch.testing.assert_close(got[1].cpu()[seen], want[1][seen], rtol=1e-3, atol=2e-3)
    assert bool((got[0].cpu()[~seen] == 0).all())
