"""quantize_q, append_kv, fetch_dequant on Hopper against the reference, on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import ops
from kernels.errors import KernelContractError
from kernels.layout import AMAX_FLOOR, FP8_MAX, Activation, CacheFormat, ExactCopy, LatentCache
from kernels.reference.linear import quantize_activations
from tests.kernels import cases
from tests.kernels.poison import poison_free_memory

pytestmark = pytest.mark.hopper
FORMATS = pytest.mark.parametrize("fmt", list(CacheFormat))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def table(positions: int = 4096, dim: int = 64) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    return torch.cat((angle.cos(), angle.sin()), -1).float()


def widths(fmt: CacheFormat) -> list[tuple[int, int]]:
    return [(512, 64)] if fmt is CacheFormat.FP8 else [(512, 64), (160, 24)]


def same_codes(device: torch.Tensor, host: torch.Tensor) -> None:
    """Equal but for rare neighbours: the kernel multiplies by 1 / scale where the reference divides."""
    if device.dtype != torch.float8_e4m3fn:
        torch.testing.assert_close(device.cpu().float(), host.float(), rtol=0.008, atol=1e-6)
        return
    a, b = device.cpu().float(), host.float()
    different = a != b
    assert float(different.float().mean()) < 1e-3
    assert bool(((a - b).abs()[different] <= 0.13 * b.abs()[different] + 0.002).all())


@FORMATS
@DTYPES
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 16), (37, 128)])
def test_quantize_q(fmt: CacheFormat, dtype: torch.dtype, tokens: int, heads: int) -> None:
    for dim, rope_dim in widths(fmt):
        # The layouts models use: content transposed from a batched product, rope a slice of a wider projection.
        content = torch.randn(heads, tokens, dim).to(dtype).transpose(0, 1)
        rope = torch.randn(tokens, heads, 128 + rope_dim).to(dtype)[..., 128:]
        content[0, 0] = 0  # an all-zero row has a finite scale
        positions = torch.randint(0, 4096, (tokens,))
        want = ops.quantize_q(content, rope, positions, table(dim=rope_dim), fmt=fmt)
        cuda_content = content.transpose(0, 1).cuda().transpose(0, 1)
        cuda_rope = torch.zeros(tokens, heads, 128 + rope_dim, dtype=dtype, device="cuda")
        cuda_rope[..., 128:] = rope.cuda()
        got = ops.quantize_q(cuda_content, cuda_rope[..., 128:], positions.cuda(), table(dim=rope_dim).cuda(), fmt=fmt)
        same_codes(got.content, want.content)
        torch.testing.assert_close(
            got.rope.cpu().float(), want.rope.float(), rtol=0.008, atol=1e-3 if fmt is CacheFormat.FP32 else 0.02
        )
        if want.scale is not None:
            torch.testing.assert_close(got.scale.cpu(), want.scale, rtol=1e-6, atol=0)
            assert float(got.scale[0, 0]) == pytest.approx(AMAX_FLOOR / FP8_MAX)


@FORMATS
@DTYPES
@pytest.mark.parametrize("interleaved_pool", [False, True])
def test_append_kv(fmt: CacheFormat, dtype: torch.dtype, interleaved_pool: bool) -> None:
    for dim, rope_dim in widths(fmt):
        tokens, blocks = 150, 9
        wide = torch.randn(tokens, dim + rope_dim).to(dtype)
        wide[7] *= 100
        weight = (torch.rand(dim) + 0.5).to(dtype)
        positions = torch.randint(0, 4096, (tokens,))
        slots = torch.randperm(blocks * 64)[:tokens]
        slots[::11] = -1
        host = LatentCache.allocate(fmt, blocks, dim, rope_dim, "cpu")
        device = LatentCache.allocate(fmt, blocks, dim, rope_dim, "cuda")
        device = cases.strided(device) if interleaved_pool else device
        args = (weight, positions, table(dim=rope_dim), slots)
        want = ops.append_kv(host, wide[:, :dim], wide[:, dim:], *args, eps=1e-6, keep=20)
        on_device = wide.cuda()
        got = ops.append_kv(device, on_device[:, :dim], on_device[:, dim:], *(a.cuda() for a in args), eps=1e-6, keep=20)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.cpu().float(), w.float(), rtol=0.01, atol=0.01)
        same_codes(device.content, host.content)
        torch.testing.assert_close(device.rope.cpu().float(), host.rope.float(), rtol=0.01, atol=0.05)
        if host.scale is not None:
            torch.testing.assert_close(device.scale.cpu(), host.scale, rtol=1e-5, atol=0)


@FORMATS
@DTYPES
def test_append_kv_with_an_exact_copy(fmt: CacheFormat, dtype: torch.dtype) -> None:
    for dim, rope_dim in widths(fmt):
        tokens, blocks = 150, 9
        wide, weight = torch.randn(tokens, dim + rope_dim).to(dtype), torch.rand(dim) + 0.5
        positions = torch.randperm(320)[:tokens]
        slots = torch.randperm(blocks * 64)[:tokens]
        slots[::11] = -1
        starts = torch.where(torch.arange(tokens) % 3 == 0, 0, -1)
        starts[1::3] = 320  # of which positions from 192 on lie beyond the copy
        args = (weight, positions, table(dim=rope_dim), slots)
        copies, caches = [], []
        for where in ("cpu", "cuda"):
            copies.append(ExactCopy(LatentCache.allocate(CacheFormat.BF16, 8, dim, rope_dim, where), starts.to(where)))
            caches.append(LatentCache.allocate(fmt, blocks, dim, rope_dim, where))
            rows = wide.to(where)
            moved = [arg.to(where) for arg in args]
            ops.append_kv(caches[-1], rows[:, :dim], rows[:, dim:], *moved, eps=1e-6, copy=copies[-1])
        for host, device in ((copies[0].cache, copies[1].cache), (caches[0], caches[1])):
            same_codes(device.content, host.content)
            torch.testing.assert_close(device.rope.cpu().float(), host.rope.float(), rtol=0.01, atol=0.05)
        assert 0 < int(copies[1].cache.content.any(-1).sum()) < tokens


@DTYPES
def test_append_kv_of_more_rows_than_the_device_has_warps(dtype: torch.dtype) -> None:
    tokens, blocks = 7001, 120
    wide, weight, positions = torch.randn(tokens, 576).to(dtype), torch.rand(512) + 0.5, torch.randint(0, 4096, (tokens,))
    slots = torch.randperm(blocks * 64)[:tokens]
    slots[::17] = -1
    host, device = (LatentCache.allocate(CacheFormat.FP8, blocks, 512, 64, where) for where in ("cpu", "cuda"))
    args = (weight, positions, table(), slots)
    want = ops.append_kv(host, wide[:, :512], wide[:, 512:], *args, eps=1e-6, keep=5000)
    on_device = wide.cuda()
    got = ops.append_kv(device, on_device[:, :512], on_device[:, 512:], *(a.cuda() for a in args), eps=1e-6, keep=5000)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.cpu().float(), w.float(), rtol=0.01, atol=0.01)
    same_codes(device.content, host.content)
    torch.testing.assert_close(device.rope.cpu().float(), host.rope.float(), rtol=0.01, atol=0.05)
    torch.testing.assert_close(device.scale.cpu(), host.scale, rtol=1e-5, atol=0)


@FORMATS
@DTYPES
def test_fetch_dequant(fmt: CacheFormat, dtype: torch.dtype) -> None:
    """Reports K01, K13: what was appended comes back; starts inside blocks, -1 tails, NaN in unused blocks."""
    for dim, rope_dim in widths(fmt):
        blocks = 12
        content, rope = torch.randn(blocks, 64, dim), torch.randn(blocks, 64, rope_dim)
        host = cases.store_cache(content, rope, fmt)
        device = cases.strided(
            LatentCache(host.content.cuda(), host.rope.cuda(), None if host.scale is None else host.scale.cuda())
        )
        block_table = torch.tensor([[3, 1, 4, -1], [5, 9, 2, 6], [0, -1, -1, -1]], dtype=torch.int32)
        starts = torch.tensor([10, 0, 64], dtype=torch.int32)
        cu_lens = torch.tensor([0, 170, 426, 426], dtype=torch.int32)
        want = ops.fetch_dequant(host, block_table, starts, cu_lens, total=426, dtype=dtype)
        got = ops.fetch_dequant(device, block_table.cuda(), starts.cuda(), cu_lens.cuda(), total=426, dtype=dtype)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.cpu().float(), w.float(), rtol=0.008, atol=1e-6)
        real = content[torch.tensor([3, 1, 4])].flatten(0, 1)[10:180]
        assert float((got[0][:170].cpu().float() - real).norm() / real.norm()) < (0.04 if fmt is CacheFormat.FP8 else 0.004)


def test_empty_batches() -> None:
    cache = LatentCache.allocate(CacheFormat.FP8, 2, 512, 64, "cuda")
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    ops.append_kv(
        cache,
        torch.empty(0, 512, device="cuda"),
        torch.empty(0, 64, device="cuda"),
        torch.ones(512, device="cuda"),
        none,
        table().cuda(),
        none,
        eps=1e-6,
    )
    assert ops.quantize_q(
        torch.empty(0, 4, 512, device="cuda"), torch.empty(0, 4, 64, device="cuda"), none, table().cuda(), fmt=CacheFormat.FP8
    ).content.shape == (0, 4, 512)


def test_a_slot_outside_the_pool_writes_nothing() -> None:
    cache = LatentCache.allocate(CacheFormat.FP8, 2, 512, 64, "cuda")
    one = torch.ones(1, 512, device="cuda")
    slots, positions = torch.tensor([2 * 64 + 5], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    ops.append_kv(cache, one, one[:, :64], one[0], positions, table().cuda(), slots, eps=1e-6)
    assert not cache.content.view(torch.uint8).any()


def test_prepared_data_gives_the_attention_of_the_real_values() -> None:
    """The chain quantize_q, append_kv, mla_decode against float64 on the values before quantization."""
    tokens, heads = 300, 16
    latent, k_rope = torch.randn(tokens, 512, device="cuda"), torch.randn(tokens, 64, device="cuda")
    weight, cos_sin = torch.ones(512, device="cuda"), table().cuda()
    positions = torch.arange(tokens, device="cuda")
    cache = LatentCache.allocate(CacheFormat.FP8, 6, 512, 64, "cuda")
    block_table = torch.tensor([[5, 0, 3, 1, 4]], dtype=torch.int32, device="cuda")
    slots = block_table[0].long()[positions // 64] * 64 + positions % 64
    keep, keep_rope = ops.append_kv(cache, latent, k_rope, weight, positions, cos_sin, slots, eps=1e-6, keep=tokens)
    q, q_rope = torch.randn(1, heads, 512, device="cuda"), torch.randn(1, heads, 64, device="cuda")
    query = ops.quantize_q(q, q_rope, positions[-1:], cos_sin, fmt=CacheFormat.FP8).unflatten(1, 1)
    lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    plan = ops.plan_decode(lens, query_len=1, num_heads=heads, fmt=CacheFormat.FP8)
    out, _ = ops.mla_decode(
        query, cache, block_table, lens, softmax_scale=1 / math.sqrt(576), causal=True, plan=plan, out_dtype=torch.float32
    )
    rotated = ops.rope(q_rope, positions[-1:], cos_sin, interleaved=True)
    logits = (q[0].double() @ keep.double().T + rotated[0].double() @ keep_rope.double().T) / math.sqrt(576)
    truth = logits.softmax(-1) @ keep.double()
    assert cases.relative_error(out[0, 0], truth) < 0.06


def test_bad_arguments_are_named() -> None:
    cache = LatentCache.allocate(CacheFormat.FP8, 2, 512, 64, "cuda")
    x, r, w = torch.ones(2, 512, device="cuda"), torch.ones(2, 64, device="cuda"), torch.ones(512, device="cuda")
    p, s, c = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda"), table().cuda()
    for name, args in {
        "slots": (x, r, w, p, c, s.int()),
        "positions": (x, r, w, p.cpu(), c, s),
        "cos_sin": (x, r, w, p, c.cpu(), s),
        "norm_weight": (x, r, w.cpu(), p, c, s),
        "latent": (x[:, :256], r, w, p, c, s),
    }.items():
        with pytest.raises(KernelContractError, match=name):
            ops.append_kv(cache, *args, eps=1e-6)
    with pytest.raises(KernelContractError, match="512"):
        ops.quantize_q(x.view(2, 2, 256), r.view(2, 2, 32), p, table(dim=32).cuda(), fmt=CacheFormat.FP8)


# ---- products with the halves of kv_b -----------------------------------------------------------------------------------


def halves_of_kv_b(heads: int, nope: int = 128, values: int = 128, latent: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [H, nope, C] and W_UV [H, C, v] as views of one matrix, on the device."""
    kv_b = (torch.randn(heads, nope + values, latent, device="cuda") / latent**0.5).bfloat16()
    return kv_b[:, :nope], kv_b[:, nope:].transpose(1, 2)


@pytest.mark.parametrize("fmt", [CacheFormat.FP8, CacheFormat.BF16])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 128), (16, 128), (64, 16), (65, 7), (200, 3)])
def test_absorbed_query_is_its_two_steps(fmt: CacheFormat, tokens: int, heads: int) -> None:
    """Several tiles of 64 a CTA and a tile's end among them; q is a slice of more rows."""
    w_uk, _ = halves_of_kv_b(heads)
    angles, positions = table().cuda(), torch.randint(0, 90, (tokens,), device="cuda")
    q = torch.randn(tokens + 3, heads, 192, device="cuda").bfloat16()[:tokens]
    q[0, 0, :128] = 0  # the floor
    content = torch.bmm(q[..., :128].transpose(0, 1).double(), w_uk.double()).transpose(0, 1)
    poison_free_memory()
    got = ops.absorb_query(q, w_uk, positions, angles, fmt=fmt)
    steps = ops.quantize_q(content.bfloat16(), q[..., 128:], positions, angles, fmt=fmt)
    if fmt is CacheFormat.FP8:
        assert got.scale is not None and steps.scale is not None
        real = got.content.double() * got.scale.unsqueeze(-1)
        torch.testing.assert_close(got.scale, steps.scale, rtol=0.01, atol=0)  # BF16 rounding of sums in another order
        torch.testing.assert_close(
            got.rope * got.scale.unsqueeze(-1), steps.rope * steps.scale.unsqueeze(-1), rtol=0.02, atol=1e-3
        )
        same = (got.content.view(torch.uint8) == steps.content.view(torch.uint8)).float().mean()
        assert float(same) > 0.97
        tolerance = 0.04
    else:
        real, tolerance = got.content.double(), 3e-3
        torch.testing.assert_close(got.rope, steps.rope, rtol=0, atol=0)
    assert float((real - content).norm() / content.norm()) < tolerance
    assert not real.isnan().any() and not got.rope.isnan().any()


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 128), (16, 128), (33, 16), (64, 16), (65, 7), (200, 3)])
def test_projected_values_are_their_two_steps(quantize: bool, tokens: int, heads: int) -> None:
    _, w_uv = halves_of_kv_b(heads)
    out = torch.randn(tokens, heads, 512, device="cuda").bfloat16()
    out[0, 0] = 0  # the floor
    want = torch.bmm(out.transpose(0, 1).double(), w_uv.double()).transpose(0, 1).flatten(1)
    poison_free_memory()
    rows = ops.project_values(out, w_uv, quantize=quantize)
    if quantize:
        assert isinstance(rows, Activation) and rows.plain is None and rows.dtype is torch.bfloat16
        steps = quantize_activations(want.bfloat16().cpu()).double().cuda()
        got = rows.quantized.dequantize().double()
        assert float((got - steps).norm() / steps.norm()) < 0.02  # a BF16 step of the sum moves few codes
        assert float((got - want).norm() / want.norm()) < 0.04
    else:
        assert float((rows.double() - want).norm() / want.norm()) < 3e-3


def test_other_widths_and_dtypes_take_the_separate_steps() -> None:
    """Heads of 64 dims, and FP32, as small models have them; no rows at all."""
    angles, positions = table().cuda(), torch.randint(0, 90, (9,), device="cuda")
    for dtype, nope in ((torch.float32, 128), (torch.bfloat16, 64)):
        w_uk, w_uv = (w.to(dtype) for w in halves_of_kv_b(5, nope, nope))
        q, out = torch.randn(9, 5, nope + 64, device="cuda").to(dtype), torch.randn(9, 5, 512, device="cuda").to(dtype)
        got = ops.absorb_query(q, w_uk, positions, angles, fmt=CacheFormat.FP8)
        content = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
        steps = ops.quantize_q(content, q[..., nope:], positions, angles, fmt=CacheFormat.FP8)
        assert torch.equal(got.content.view(torch.uint8), steps.content.view(torch.uint8)) and torch.equal(got.rope, steps.rope)
        rows = ops.project_values(out, w_uv, quantize=False)
        assert torch.equal(rows, torch.bmm(out.transpose(0, 1), w_uv).transpose(0, 1).flatten(1))
    w_uk, w_uv = halves_of_kv_b(5)
    none = ops.absorb_query(torch.randn(0, 5, 192, device="cuda").bfloat16(), w_uk, positions[:0], angles, fmt=CacheFormat.FP8)
    assert none.content.shape == (0, 5, 512)
    assert ops.project_values(torch.randn(0, 5, 512, device="cuda").bfloat16(), w_uv, quantize=True).quantized.data.shape == (
        0,
        640,
    )
