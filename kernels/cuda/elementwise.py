"""rms_norm, alone and with quantization (csrc/norm.cu), rope, join_heads, silu_and_mul and merge_attention (csrc/elementwise.cu)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from kernels.cuda import binding, gemm
from kernels.errors import KernelContractError
from kernels.layout import Activation

_VECTOR, _MOST_THREADS = 8, 1024  # values a thread and pass, threads of a CTA: csrc/norm.cu
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}

_NormArgs = binding.struct("_NormArgs", [
    ("x", c_void_p), ("residual", c_void_p), ("weight", c_void_p), ("sum", c_void_p), ("out", c_void_p),
    ("to", gemm.QuantizedArgs), ("x_stride", c_int64), ("weight_fp32", c_int), ("eps", c_float),
])  # fmt: skip
_RopeArgs = binding.struct("_RopeArgs", [
    ("x", c_void_p), ("positions", c_void_p), ("cos_sin", c_void_p), ("out", c_void_p),
    ("token_stride", c_int64), ("head_stride", c_int64), ("out_token_stride", c_int64), ("out_head_stride", c_int64),
    ("tokens", c_int), ("heads", c_int), ("half", c_int), ("interleaved", c_int),
])  # fmt: skip
_JoinArgs = binding.struct("_JoinArgs", [
    ("own", c_void_p), ("shared", c_void_p), ("out", c_void_p),
    ("token_stride", c_int64), ("head_stride", c_int64), ("shared_stride", c_int64), ("count", c_int64),
    ("heads", c_int), ("own_size", c_int), ("size", c_int), ("_pad", c_int),
])  # fmt: skip
_SiluArgs = binding.struct("_SiluArgs", [
    ("gate_up", c_void_p), ("out", c_void_p), ("stride", c_int64), ("rows", c_int64), ("dim", c_int),
])  # fmt: skip
_MergeArgs = binding.struct("_MergeArgs", [
    ("out_a", c_void_p), ("out_b", c_void_p), ("lse_a", c_void_p), ("lse_b", c_void_p), ("out", c_void_p), ("lse", c_void_p),
    ("rows", c_int), ("dim", c_int),
])  # fmt: skip


def _launch(op: str, x: torch.Tensor, grid: int, args: ctypes.Structure) -> None:
    if x.dtype not in _NAMES:
        raise KernelContractError(op, f"BF16 or FP32 expected, got {x.dtype}")
    if grid:
        with torch.cuda.device(x.device):
            binding.kernel("elementwise", f"{op}_{_NAMES[x.dtype]}", x.device.index).launch(grid, 256, args, overlap=True)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, D] without a copy where its strides allow."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.rms_norm. The sum is rounded to x's dtype before it is normalized, so both results agree."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    quantized = gemm.QuantizedArgs(None, None, x.shape[-1], 0)
    return out, _norm("rms_norm", x, weight, eps, residual, out, quantized)


def rms_norm_quantized(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, keep_plain: bool
) -> tuple[Activation, torch.Tensor]:
    """See ops.rms_norm_quantized."""
    if x.shape[1] % 16:
        raise KernelContractError("rms_norm_quantized", f"the width must be a multiple of 16, got {x.shape[1]}")
    quantized = gemm.empty_activation(x.shape[0], x.shape[1], x.device)
    plain = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep_plain else None
    total = _norm("rms_norm_quantized", x, weight, eps, residual, plain, gemm.quantized_args(quantized))
    return Activation(quantized, plain, x.dtype), total


def _norm(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    to: gemm.QuantizedArgs,
) -> torch.Tensor:
    """Launch one norm; returns x + residual, x itself without one."""
    if weight.dtype not in _NAMES or not weight.is_contiguous() or weight.device != x.device:
        raise KernelContractError(op, f"weight must be contiguous BF16 or FP32 on {x.device}")
    if residual is not None and (residual.dtype != x.dtype or residual.device != x.device):
        raise KernelContractError(op, f"residual must be {x.dtype} on {x.device}")
    if x.dtype not in _NAMES:
        raise KernelContractError(op, f"BF16 or FP32 expected, got {x.dtype}")
    width, flat = x.shape[-1], _rows(x)
    dense = None if residual is None else residual.contiguous()
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return total
    args = _NormArgs(
        flat.data_ptr(), binding.pointer(dense), weight.data_ptr(), None if residual is None else total.data_ptr(),
        binding.pointer(out), to, flat.stride(0), int(weight.dtype is torch.float32), eps,
    )  # fmt: skip
    vectors = -(-width // _VECTOR)
    aligned = (
        all(t is None or t.data_ptr() % 16 == 0 for t in (flat, dense, weight)) and flat.stride(0) * flat.itemsize % 16 == 0
    )
    if width % _VECTOR or not aligned or vectors > 2 * _MOST_THREADS:
        if to.codes:
            raise KernelContractError(op, f"rows must be aligned to 16 bytes and at most {2 * _MOST_THREADS * _VECTOR} wide")
        form, threads = "any", min(_MOST_THREADS, -(-width // 32) * 32)
    else:
        form, per_pass = ("vectors_1", vectors) if vectors <= _MOST_THREADS else ("vectors_2", -(-vectors // 2))
        threads = -(-per_pass // 32) * 32
    with torch.cuda.device(x.device):
        kernel = binding.kernel("norm", f"norm_{form}_{_NAMES[x.dtype]}", x.device.index)
        kernel.launch(flat.shape[0], threads, args, overlap=True)
    return total


def rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool, in_place: bool = False
) -> torch.Tensor:
    """See ops.rope."""
    if x.shape[-1] % 2:
        raise KernelContractError("rope", f"the last dimension of x must be even, got {x.shape[-1]}")
    if positions.device != x.device or cos_sin.device != x.device:
        raise KernelContractError("rope", f"positions and cos_sin must be on {x.device}")
    if not positions.is_contiguous() or not cos_sin.is_contiguous():
        raise KernelContractError("rope", "positions and cos_sin must be contiguous")
    view = x if x.ndim == 3 else x.unsqueeze(1)
    if view.stride(-1) != 1:
        if in_place:
            raise KernelContractError("rope", "the last dimension of x must be dense to be rotated in place")
        view = view.contiguous()
    out = x if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to = out if out.ndim == 3 else out.unsqueeze(1)
    args = _RopeArgs(
        view.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), to.data_ptr(),
        view.stride(0), view.stride(1), to.stride(0), to.stride(1), view.shape[0], view.shape[1], x.shape[-1] // 2, int(interleaved),
    )  # fmt: skip
    vectors = interleaved and x.dtype is torch.bfloat16 and x.shape[-1] % 8 == 0 and all(map(_in_vectors, (view, to, cos_sin)))
    _launch("rope_vectors" if vectors else "rope", view, -(-x.numel() // (2048 if vectors else 512)), args)
    return out


def join_heads(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """See ops.join_heads."""
    tokens, heads, width = own.shape
    out = torch.empty(tokens, heads, width + shared.shape[1], dtype=own.dtype, device=own.device)
    each = 16 // own.itemsize
    if width % each or not (_in_vectors(own) and _in_vectors(shared) and _in_vectors(out)):
        return torch.cat((own, shared.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    args = _JoinArgs(
        own.data_ptr(), shared.data_ptr(), out.data_ptr(), own.stride(0) // each, own.stride(1) // each, shared.stride(0) // each,
        out.numel() // each, heads, width // each, out.shape[2] // each, 0,
    )  # fmt: skip
    if out.numel():
        with torch.cuda.device(own.device):
            kernel = binding.kernel("elementwise", "join_heads_any", own.device.index)
            kernel.launch(-(-out.numel() // each // 256), 256, args, overlap=True)
    return out


def _in_vectors(x: torch.Tensor) -> bool:
    """Whether every row is dense and begins at a multiple of 16 bytes."""
    rows = x.stride()[:-1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride * x.itemsize % 16 == 0 for stride in rows)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ops.silu_and_mul."""
    flat = _rows(gate_up)
    dim = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], dim, dtype=gate_up.dtype, device=gate_up.device)
    args = _SiluArgs(flat.data_ptr(), out.data_ptr(), flat.stride(0), flat.shape[0], dim)
    _launch("silu_and_mul", flat, -(-out.numel() // 256), args)
    return out


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.merge_attention. Copies operands that are not dense, so the two may have different strides."""
    if out_a.dtype != out_b.dtype or lse_a.dtype != torch.float32 or lse_b.dtype != torch.float32:
        raise KernelContractError("merge_attention", "outputs must share a dtype and lse must be FP32")
    tokens, heads, dim = out_a.shape
    a, b, la, lb = out_a.contiguous(), out_b.contiguous(), lse_a.contiguous(), lse_b.contiguous()
    out, lse = torch.empty_like(a), torch.empty_like(la)
    args = _MergeArgs(
        a.data_ptr(), b.data_ptr(), la.data_ptr(), lb.data_ptr(), out.data_ptr(), lse.data_ptr(), tokens * heads, dim
    )
    vectors = dim % 4 == 0 and all(t.data_ptr() % 16 == 0 for t in (a, b, out))
    _launch("merge_attention_vectors" if vectors else "merge_attention", a, -(-(tokens * heads) // 8), args)
    return out, lse
