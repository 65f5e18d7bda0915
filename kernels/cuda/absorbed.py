"""The two products with the halves of kv_b around decode attention, each with what follows it (csrc/absorbed).

Widths of the published models, 128 + 64 to 512 and 512 to 128 dims a head in BF16, are one launch; others run as torch's
batched product and the separate kernels.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch

from kernels.cuda import binding, gemm, latent
from kernels.errors import KernelContractError
from kernels.layout import FP8_LATENT_DIM, FP8_ROPE_DIM, Activation, CacheFormat, LatentQuery, Rows

_HEAD, _CHUNK, _THREADS = 128, 64, 256  # HEAD, THREADS of csrc/absorbed/absorbed.cuh; dims of a 128-byte row
_TILES = (16, 32, 64)  # tokens of a tile, a kernel each

_QueryArgs = binding.struct("_QueryArgs", [
    ("w", binding.TensorMap), ("q", binding.TensorMap), ("rope", c_void_p), ("positions", c_void_p), ("cos_sin", c_void_p),
    ("content", c_void_p), ("rope_out", c_void_p), ("scale", c_void_p), ("rope_token", c_int64), ("rope_head", c_int64),
    ("tokens", c_int), ("heads", c_int), ("splits", c_int), ("_pad", c_int), ("_alignment", c_int64 * 6),
])  # fmt: skip
_ValuesArgs = binding.struct("_ValuesArgs", [
    ("w", binding.TensorMap), ("x", binding.TensorMap), ("to", gemm.QuantizedArgs), ("out", c_void_p),
    ("tokens", c_int), ("heads", c_int), ("splits", c_int), ("_pad", c_int), ("_alignment", c_int64 * 2),
])  # fmt: skip


def absorb_query(
    q: torch.Tensor, w_uk: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, fmt: CacheFormat
) -> LatentQuery:
    """See ops.absorb_query."""
    op, device = "absorb_query", q.device
    tokens, heads, _ = q.shape
    nope, dim = w_uk.shape[1:]
    q_rope = q[..., nope:]
    published = (nope, dim, q_rope.shape[2]) == (_HEAD, FP8_LATENT_DIM, FP8_ROPE_DIM) and _is_aligned_bf16(q, w_uk)
    if not published or fmt is CacheFormat.FP32 or w_uk.stride(2) != 1:
        content = torch.bmm(q[..., :nope].transpose(0, 1).to(w_uk.dtype), w_uk).transpose(0, 1).to(q.dtype)
        return latent.quantize_q(content, q_rope, positions, cos_sin, fmt=fmt)
    if not positions.is_contiguous() or not cos_sin.is_contiguous():
        raise KernelContractError(op, "positions and cos_sin must be contiguous")
    fp8 = fmt is CacheFormat.FP8
    query = LatentQuery(
        content=torch.empty(tokens, heads, dim, dtype=fmt.content_dtype, device=device),
        rope=torch.empty(tokens, heads, FP8_ROPE_DIM, dtype=fmt.rope_dtype, device=device),
        scale=torch.empty(tokens, heads, device=device) if fp8 else None,
    )
    if tokens == 0:
        return query
    tile = _tile(tokens)
    args = _QueryArgs()
    args.w = _map(w_uk, (dim, nope, heads), (w_uk.stride(1), w_uk.stride(0)), (_CHUNK, nope, 1))
    args.q = _map(q, (q.shape[2], heads, tokens), (q.stride(1), q.stride(0)), (_CHUNK, 1, tile))
    args.rope, args.positions, args.cos_sin = q_rope.data_ptr(), positions.data_ptr(), cos_sin.data_ptr()
    args.content, args.rope_out, args.scale = query.content.data_ptr(), query.rope.data_ptr(), binding.pointer(query.scale)
    args.rope_token, args.rope_head = q.stride(0), q.stride(1)
    args.tokens, args.heads, args.splits = tokens, heads, _splits(tokens, tile, heads, device)
    with torch.cuda.device(device):
        kernel = _kernel("absorb_query_fp8" if fp8 else "absorb_query_bf16", op, tile, device.index)
        kernel.launch(heads * args.splits, _THREADS, args, overlap=True)
    return query


def project_values(out: torch.Tensor, w_uv: torch.Tensor, *, quantize: bool) -> Rows:
    """See ops.project_values."""
    op, device = "project_values", out.device
    tokens, heads, dim = out.shape
    values = w_uv.shape[2]
    if (dim, values) != (FP8_LATENT_DIM, _HEAD) or not _is_aligned_bf16(out, w_uv.transpose(1, 2)):
        rows = torch.bmm(out.transpose(0, 1).to(w_uv.dtype), w_uv).transpose(0, 1).flatten(1).to(out.dtype)
        return Activation(gemm.quantize_1x128(rows), None, rows.dtype) if quantize else rows
    quantized = gemm.empty_activation(tokens, heads * values, device) if quantize else None
    plain = None if quantize else torch.empty(tokens, heads * values, dtype=torch.bfloat16, device=device)
    if tokens:
        args = _ValuesArgs()
        tile = _tile(tokens)
        args.w = _map(w_uv, (dim, values, heads), (w_uv.stride(2), w_uv.stride(0)), (_CHUNK, values, 1))
        args.x = _map(out, (dim, heads, tokens), (out.stride(1), out.stride(0)), (_CHUNK, 1, tile))
        if quantized is not None:
            args.to = gemm.quantized_args(quantized)
        args.out = binding.pointer(plain)
        args.tokens, args.heads, args.splits = tokens, heads, _splits(tokens, tile, heads, device)
        with torch.cuda.device(device):
            kernel = _kernel(op, op, tile, device.index)
            kernel.launch(heads * args.splits, _THREADS, args, overlap=True)
    if quantized is not None:
        return Activation(quantized, None, torch.bfloat16)
    assert plain is not None
    return plain


def _tile(tokens: int) -> int:
    return next((t for t in _TILES if t >= tokens), _TILES[-1])


def _kernel(module: str, op: str, tile: int, device_index: int) -> binding.Kernel:
    """All tiles are loaded at the first call, so that a later batch size may come up inside a graph capture."""
    return {t: binding.kernel(module, f"{op}_{t}", device_index) for t in _TILES}[tile]


def _splits(tokens: int, tile: int, heads: int, device: torch.device) -> int:
    """CTAs that share the token tiles of one head."""
    return max(1, min(-(-tokens // tile), binding.sm_count(device.index) // heads))


def _is_aligned_bf16(*tensors: torch.Tensor) -> bool:
    """Whether TMA can read them: BF16, dense in the last dimension, rows on 16-byte boundaries."""
    return all(
        t.dtype is torch.bfloat16
        and t.stride(-1) == 1
        and t.data_ptr() % 16 == 0
        and all(stride * t.itemsize % 16 == 0 for stride in t.stride()[:-1])
        for t in tensors
    )


def _map(t: torch.Tensor, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> binding.TensorMap:
    """strides in elements, of all dimensions but the innermost."""
    return binding.tensor_map("absorbed", t.data_ptr(), t.dtype, dims, tuple(s * t.itemsize for s in strides), box)
