"""Query quantization, append and fetch of the latent cache against the equations, written out plainly."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.errors import KernelContractError
from kernels.layout import AMAX_FLOOR, BLOCK_SIZE, FP8, FP8_MAX, CacheFormat, ExactCopy, LatentCache
from kernels.reference.latent import E4M3_AS_HALF, e4m3_as_half
from tests.kernels.latent_cases import angle_table, poisoned_cache


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Interleaved rotation as complex products in FP64."""
    cos, sin = cos_sin[positions].double().chunk(2, dim=-1)
    while cos.ndim < x.ndim:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_every_e4m3_code_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    values = e4m3_as_half(codes) * E4M3_AS_HALF
    finite = ~codes.float().isnan()
    assert torch.equal(values[finite], codes.float()[finite])
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_q_puts_both_parts_into_one_domain(dtype) -> None:
    """3.1.2 and Eq. 6: content codes and RoPE share the scale amax / 448 of their token and head."""
    cos_sin, positions = angle_table(64), torch.tensor([0, 3, 77, 500])
    wide = torch.randn(4, 3, 600).to(dtype)  # strided views, as the model passes them
    content, rope = wide[..., 5:517], wide[..., 520:584]
    query = ops.quantize_q(content, rope, positions, cos_sin, fmt=CacheFormat.FP8)
    assert query.content.dtype is FP8 and query.rope.dtype is torch.bfloat16 and query.scale.dtype is torch.float32
    assert torch.allclose(query.scale, content.float().abs().amax(-1) / FP8_MAX)
    scale = query.scale.unsqueeze(-1).double()
    error = (query.content.double() * scale - content.double()).abs()
    assert (error <= content.double().abs() / 16 + scale * 2**-10).all()  # half a unit of three mantissa bits
    want = rotate(rope, positions, cos_sin)
    assert torch.allclose(query.rope.double() * scale, want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("fmt", [CacheFormat.FP32, CacheFormat.BF16])
def test_exact_formats_only_rotate_and_cast(fmt) -> None:
    cos_sin, positions = angle_table(16), torch.tensor([9, 2])
    content, rope = torch.randn(2, 3, 48), torch.randn(2, 3, 16)
    query = ops.quantize_q(content, rope, positions, cos_sin, fmt=fmt)
    assert query.scale is None
    assert torch.equal(query.content, content.to(fmt.content_dtype))
    assert torch.allclose(query.rope.double(), rotate(rope, positions, cos_sin), atol=1e-5 if fmt is CacheFormat.FP32 else 2e-2)


@pytest.mark.parametrize("fmt", list(CacheFormat))
def test_append_then_fetch_restores_real_values(fmt) -> None:
    """Report K13: real = code * scale, by a round trip. Report K14: scales are FP32 beside BF16 weights."""
    lens = [70, 1, 130]
    cache = poisoned_cache(fmt, 8, 512, 64, padding=3)
    table = torch.tensor([[5, 2, -9], [7, -9, -9], [0, 6, 3]], dtype=torch.int32)
    cos_sin, weight = angle_table(64), torch.rand(512) + 0.5
    position = torch.cat([torch.arange(n) for n in lens])
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    slots = table[sequence, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    wide = torch.randn(sum(lens), 700).to(torch.bfloat16)
    latent, k_rope = wide[:, 3:515], wide[:, 520:584]
    kept = ops.append_kv(cache, latent, k_rope, weight, position, cos_sin, slots, eps=1e-6, keep=5)
    want_latent, want_rope = normalize(latent, weight, 1e-6), rotate(k_rope, position, cos_sin)
    assert kept[0].dtype is torch.bfloat16
    assert torch.allclose(kept[0].double(), want_latent[-5:], rtol=2**-8, atol=1e-6)
    assert torch.allclose(kept[1].double(), want_rope[-5:], rtol=2**-8, atol=1e-6)
    if cache.scale is not None:
        assert cache.scale.dtype is torch.float32

    starts = torch.tensor([2, 0, 64], dtype=torch.int32)
    counts = [68, 1, 60]
    cu_lens = torch.tensor([0, 68, 69, 129], dtype=torch.int32)
    got = ops.fetch_dequant(cache, table, starts, cu_lens, total=129, dtype=torch.float32)
    rows = torch.cat([torch.nonzero(sequence == i)[:, 0][int(s) : int(s) + n] for i, (s, n) in enumerate(zip(starts, counts))])
    relative = {CacheFormat.FP32: 1e-5, CacheFormat.BF16: 2**-8, CacheFormat.FP8: 2**-4}[fmt]
    row_max = want_latent[rows].abs().amax(-1, keepdim=True)
    assert ((got[0] - want_latent[rows]).abs() <= relative * want_latent[rows].abs() + row_max * 1e-5).all()
    assert torch.allclose(got[1].double(), want_rope[rows], rtol=2**-7, atol=1e-5)


def test_exact_copy_of_some_sequences() -> None:
    """Rows with a slot, of a sequence that has a copy, within the copy; everything else stays as it was."""
    cos_sin, weight = angle_table(64), torch.rand(512) + 0.5
    latent, k_rope = torch.randn(6, 512), torch.randn(6, 64)
    positions = torch.tensor([3, 5, 200, 70, 4, 63])
    starts = torch.tensor([0, -1, 0, 64, 0, 64])  # the third lies beyond the copy's two blocks
    slots = torch.tensor([9, 8, 7, 6, -1, 5])
    copy = ExactCopy(LatentCache.allocate(CacheFormat.FP32, 2, 512, 64, "cpu"), starts)
    cache = poisoned_cache(CacheFormat.FP8, 1, 512, 64)
    plain = poisoned_cache(CacheFormat.FP8, 1, 512, 64)
    ops.append_kv(cache, latent, k_rope, weight, positions, cos_sin, slots, eps=1e-6, copy=copy)
    ops.append_kv(plain, latent, k_rope, weight, positions, cos_sin, slots, eps=1e-6)
    assert torch.equal(cache.content.view(torch.uint8), plain.content.view(torch.uint8))
    want = normalize(latent, weight, 1e-6), rotate(k_rope, positions, cos_sin)
    for part, values in zip((copy.cache.content, copy.cache.rope), want):
        rows = part.flatten(0, 1)
        assert rows.any(-1).nonzero().flatten().tolist() == [3, 127]
        assert torch.allclose(rows[[3, 127]].double(), values[[0, 5]], atol=1e-5)


def test_slot_minus_one_writes_nothing() -> None:
    """Padded rows may hold anything; only rows with a slot change the cache."""
    for fmt in CacheFormat:
        cache = LatentCache.allocate(fmt, 2, 512, 64, "cpu")
        before = [part.clone() for part in (cache.content, cache.rope)]
        latent, k_rope = torch.full((3, 512), float("nan")), torch.full((3, 64), float("nan"))
        latent[1], k_rope[1] = 1.0, 1.0
        slots = torch.tensor([-1, BLOCK_SIZE + 7, -1])
        ops.append_kv(
            cache, latent, k_rope, torch.ones(512), torch.zeros(3, dtype=torch.int64), angle_table(64), slots, eps=1e-6
        )
        for part, old in zip((cache.content, cache.rope), before):
            changed = (part.float() != old.float()).any(-1).nonzero().tolist()
            assert changed == [[1, 7]]


def test_all_zero_latent_beside_large_rope_stays_finite() -> None:
    """The scale's floor: RoPE values of 1e3 are divided by it and multiplied with each other without overflow."""
    cache = LatentCache.allocate(CacheFormat.FP8, 1, 512, 64, "cpu")
    cos_sin, zero = angle_table(64), torch.zeros(1, dtype=torch.int64)
    ops.append_kv(cache, torch.zeros(1, 512), torch.full((1, 64), 1e3), torch.ones(512), zero, cos_sin, zero, eps=1e-6)
    assert float(cache.scale[0, 0]) == pytest.approx(AMAX_FLOOR / FP8_MAX)
    assert torch.isfinite(cache.rope[0, 0]).all()
    query = ops.quantize_q(torch.zeros(1, 1, 512), torch.full((1, 1, 64), 1e3), zero, cos_sin, fmt=CacheFormat.FP8)
    out, lse = ops.mla_decode(
        query.unflatten(1, 1), cache, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32),
        softmax_scale=0.1, causal=True, plan=None, out_dtype=torch.float32,
    )  # fmt: skip
    want = 0.1 * float(
        (query.rope * query.scale.unsqueeze(-1)).flatten().double() @ (cache.rope[0, 0] * cache.scale[0, 0]).double()
    )
    assert float(lse) == pytest.approx(want, rel=1e-3)
    assert (out == 0).all()


def test_contract_violations_name_the_argument() -> None:
    cache = LatentCache.allocate(CacheFormat.FP32, 1, 48, 16, "cpu")
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(KernelContractError, match="slots"):
        ops.append_kv(cache, torch.zeros(1, 48), torch.zeros(1, 16), torch.ones(48), one, angle_table(16), one.int(), eps=1e-6)
    with pytest.raises(KernelContractError, match="latent"):
        ops.append_kv(cache, torch.zeros(1, 47), torch.zeros(1, 16), torch.ones(48), one, angle_table(16), one, eps=1e-6)
    for starts, part in ((one.int(), "copy.starts"), (one, "widths")):
        copy = ExactCopy(LatentCache.allocate(CacheFormat.FP32, 1, 48 if part == "copy.starts" else 64, 16, "cpu"), starts)
        with pytest.raises(KernelContractError, match=part):
            rows = torch.zeros(1, 48), torch.zeros(1, 16)
            ops.append_kv(cache, *rows, torch.ones(48), one, angle_table(16), one, eps=1e-6, copy=copy)
    with pytest.raises(ValueError, match="kv_lora_rank 512"):
        LatentCache.allocate(CacheFormat.FP8, 1, 48, 16, "cpu")
