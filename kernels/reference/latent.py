"""The latent cache: query quantization, append into paged slots, fetch with dequantization (3.1, 3.3.1, Eq. 6)."""

from __future__ import annotations

import torch

from kernels.layout import (
    AMAX_FLOOR,
    BLOCK_SIZE,
    FP8,
    FP8_MAX,
    Activation,
    CacheFormat,
    ExactCopy,
    LatentCache,
    LatentQuery,
    Rows,
)
from kernels.reference.elementwise import normalize, rotate
from kernels.reference.linear import quantize_activation

# An E4M3 code shifted into a half-precision number keeps its sign, exponent and mantissa; only the exponent bias differs,
# by 15 - 7 = 8. The reinterpretation is a dozen times faster than torch's conversion on a CPU.
E4M3_AS_HALF = 256.0


def e4m3_as_half(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of E4M3 codes divided by E4M3_AS_HALF; NaN codes become 1.875, so they never spread."""
    sign_extended = codes.view(torch.int8).to(torch.int16) << 7
    return (sign_extended & ~0x4000).view(torch.float16).float()


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes of x [..., C] and FP32 scales [...]: scale = max(amax, AMAX_FLOOR) / 448, one per row."""
    scale = x.abs().amax(dim=-1).clamp_min(AMAX_FLOOR) / FP8_MAX
    return (x / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def quantize_q(
    q_content: torch.Tensor, q_rope: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, fmt: CacheFormat
) -> LatentQuery:
    rope = rotate(q_rope, positions, cos_sin, interleaved=True)
    if fmt is not CacheFormat.FP8:
        return LatentQuery(q_content.to(fmt.content_dtype), rope.to(fmt.rope_dtype), None)
    content, scale = quantize_rows(q_content.float())
    return LatentQuery(content, (rope / scale.unsqueeze(-1)).to(fmt.rope_dtype), scale)


def absorb_query(
    q: torch.Tensor, w_uk: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, fmt: CacheFormat
) -> LatentQuery:
    nope = w_uk.shape[1]
    content = torch.bmm(q[..., :nope].transpose(0, 1).to(w_uk.dtype), w_uk).transpose(0, 1).to(q.dtype)
    return quantize_q(content, q[..., nope:], positions, cos_sin, fmt=fmt)


def project_values(out: torch.Tensor, w_uv: torch.Tensor, *, quantize: bool) -> Rows:
    rows = torch.bmm(out.transpose(0, 1).to(w_uv.dtype), w_uv).transpose(0, 1).flatten(1).to(out.dtype)
    return Activation(quantize_activation(rows), None, rows.dtype) if quantize else rows


def append_kv(
    cache: LatentCache,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    norm_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float,
    keep: int = 0,
    copy: ExactCopy | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    content = normalize(latent, norm_weight, eps)
    rope = rotate(k_rope, positions, cos_sin, interleaved=True)
    kept = latent.shape[0] - keep
    result = content[kept:].to(latent.dtype), rope[kept:].to(k_rope.dtype)

    live = slots >= 0
    if copy is not None:
        at = copy.starts + positions
        copied = live & (copy.starts >= 0) & (at < copy.cache.num_blocks * BLOCK_SIZE)
        for part, values in ((copy.cache.content, content), (copy.cache.rope, rope)):
            part.flatten(0, 1)[at[copied]] = values[copied].to(part.dtype)
    if not bool(live.all()):
        slots, content, rope = slots[live], content[live], rope[live]
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    if cache.scale is not None:
        codes, scale = quantize_rows(content)
        # Written as bytes: torch has no indexed write of FP8 on every device.
        cache.content.view(torch.uint8)[block, offset] = codes.view(torch.uint8)
        cache.rope[block, offset] = (rope / scale.unsqueeze(-1)).to(cache.rope.dtype)
        cache.scale[block, offset] = scale
    else:
        cache.content[block, offset] = content.to(cache.content.dtype)
        cache.rope[block, offset] = rope.to(cache.rope.dtype)
    return result


def fetch_dequant(
    cache: LatentCache,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    cu_lens: torch.Tensor,
    *,
    total: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = cache.content.device
    sequence = torch.repeat_interleave(torch.arange(len(starts), device=device), cu_lens.diff(), output_size=total)
    position = torch.arange(total, device=device) - cu_lens[sequence] + starts[sequence]
    block, offset = block_table[sequence, position // BLOCK_SIZE].long(), position % BLOCK_SIZE
    rope = cache.rope[block, offset].float()
    if cache.scale is None:
        return cache.content[block, offset].to(dtype), rope.to(dtype)
    scale = cache.scale[block, offset].unsqueeze(-1)
    content = e4m3_as_half(cache.content.view(torch.int8)[block, offset]) * (scale * E4M3_AS_HALF)
    return content.to(dtype), (rope * scale).to(dtype)
