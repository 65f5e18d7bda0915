"""Dense products with plain and with block-scaled FP8 weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.layout import (
    AMAX_FLOOR,
    FP8,
    FP8_MAX,
    WEIGHT_BLOCK,
    Activation,
    BlockScaledWeight,
    QuantizedActivation,
    Rows,
    Weight,
    plain_rows,
)
from kernels.reference.elementwise import rms_norm, silu_and_mul

_SLOW_BF16 = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
_ROWS_WORTH_A_CAST = 3  # fewer rows are bound by reading the weight, which a cast only adds to


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype to multiply a plain weight in: its own, but FP32 for BF16 on a CPU without BF16 instructions.

    There oneDNN's BF16 products of 16 rows take 4 times (batched over heads: 15 to 20 times) as long as casting both
    operands and multiplying in FP32, whose result is no less exact.
    """
    slow = _SLOW_BF16 and weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
    return torch.float32 if slow else weight.dtype


def quantize_activation(x: torch.Tensor) -> QuantizedActivation:
    """x [T, K] in E4M3 with one scale per token and 128 channels, amax floored at 1e-4."""
    width = x.shape[-1]
    groups = F.pad(x.float(), (0, -width % WEIGHT_BLOCK)).unflatten(-1, (-1, WEIGHT_BLOCK))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(AMAX_FLOOR) / FP8_MAX
    codes = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return QuantizedActivation(codes.flatten(-2)[..., :width], scale.squeeze(-1))


def quantize_activations(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as the FP8 product sees it, FP32."""
    return quantize_activation(x).dequantize()


def rms_norm_quantized(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, keep_plain: bool
) -> tuple[Activation, torch.Tensor]:
    normalized, total = rms_norm(x, weight, eps=eps, residual=residual)
    return Activation(quantize_activation(normalized), normalized if keep_plain else None, x.dtype), total


def linear(x: Rows, weight: Weight) -> torch.Tensor:
    if isinstance(weight, BlockScaledWeight):
        real = x.quantized.dequantize() if isinstance(x, Activation) else quantize_activations(x)
        return F.linear(real, weight.dequantize()).to(x.dtype)
    x, dtype = plain_rows(x), product_dtype(weight)
    if dtype is weight.dtype or x.numel() < _ROWS_WORTH_A_CAST * x.shape[-1]:
        return F.linear(x, weight)
    return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)


def gated_mlp(x: Rows, gate_up: Weight, down: Weight) -> torch.Tensor:
    return linear(silu_and_mul(linear(x, gate_up)), down)


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), weight.float())
