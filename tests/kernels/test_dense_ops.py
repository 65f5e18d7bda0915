"""gated_mlp and router_logits through kernels.ops, on the CPU."""

from __future__ import annotations

import pytest
import torch

from kernels import ops
from kernels.errors import KernelContractError
from kernels.layout import FP8, BlockScaledWeight, plain_rows


def block_scaled(n: int, k: int) -> BlockScaledWeight:
    return BlockScaledWeight(torch.randn(n, k).mul(60).to(FP8), torch.rand(-(-n // 128), -(-k // 128)) / 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [True, False])
def test_gated_mlp_is_its_three_operations(dtype: torch.dtype, quantized: bool) -> None:
    gate_up, down = block_scaled(384, 160), block_scaled(160, 192)
    weights = (gate_up, down) if quantized else (gate_up.dequantize(dtype), down.dequantize(dtype))
    x = torch.randn(5, 160, dtype=dtype)
    steps = ops.linear(ops.silu_and_mul(ops.linear(x, weights[0])), weights[1])
    assert torch.equal(ops.gated_mlp(x, *weights), steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_quantized_by_their_norm_give_the_products_of_plain_ones(dtype: torch.dtype) -> None:
    x, residual, norm = torch.randn(5, 160).to(dtype), torch.randn(5, 160).to(dtype), torch.rand(160)
    rows, total = ops.rms_norm_quantized(x, norm, eps=1e-6, residual=residual, keep_plain=True)
    plain, plain_total = ops.rms_norm(x, norm, eps=1e-6, residual=residual)
    gate_up, down = block_scaled(384, 160), block_scaled(160, 192)
    assert torch.equal(total, plain_total) and torch.equal(plain_rows(rows), plain)
    for result in (ops.linear(rows, gate_up), ops.gated_mlp(rows, gate_up, down), ops.linear(rows, gate_up.dequantize(dtype))):
        assert result.dtype is dtype
    assert torch.equal(ops.linear(rows, gate_up), ops.linear(plain, gate_up))
    assert torch.equal(ops.gated_mlp(rows, gate_up, down), ops.gated_mlp(plain, gate_up, down))
    assert torch.equal(ops.linear(rows, gate_up.dequantize(dtype)), ops.linear(plain, gate_up.dequantize(dtype)))
    assert ops.rms_norm_quantized(x, norm, eps=1e-6, keep_plain=False)[0].plain is None


def test_gated_mlp_refuses_halves_that_do_not_fit() -> None:
    x = torch.randn(2, 32)
    with pytest.raises(KernelContractError, match="gate_up must be"):
        ops.gated_mlp(x, torch.randn(48, 32), torch.randn(32, 48))
    with pytest.raises(KernelContractError, match="x must be"):
        ops.gated_mlp(x[0], torch.randn(96, 32), torch.randn(32, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_logits_are_not_rounded(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 512).to(dtype), torch.randn(24, 512).to(dtype)
    logits = ops.router_logits(x, weight)
    assert logits.dtype is torch.float32
    exact = x.double() @ weight.double().t()
    assert ((logits - exact).norm() / exact.norm()) < 1e-6


def test_router_logits_refuse_what_does_not_fit() -> None:
    with pytest.raises(KernelContractError, match="does not fit"):
        ops.router_logits(torch.randn(2, 32), torch.randn(8, 48))
    with pytest.raises(KernelContractError, match="BF16 or FP32"):
        ops.router_logits(torch.randn(2, 32).half(), torch.randn(8, 32))
