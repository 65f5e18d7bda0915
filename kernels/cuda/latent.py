"""quantize_q, append_kv and fetch_dequant on Hopper (csrc/latent.cu): outputs, strides, launches."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from kernels.cuda import binding
from kernels.errors import KernelContractError
from kernels.layout import BLOCK_SIZE, FP8_LATENT_DIM, FP8_ROPE_DIM, CacheFormat, ExactCopy, LatentCache, LatentQuery

WARPS = 4  # rows of a CTA, WARPS of csrc/latent.cu
_FETCH_ROWS = 4  # of a warp, FETCH_ROWS there
_APPEND_CTAS = 7  # of an SM: as many as its registers hold
_FEW_ROWS = 1024  # a decode step's: these start beside a product, more stream through L1
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}

_QuantizeQArgs = binding.struct("_QuantizeQArgs", [
    ("content", c_void_p), ("rope", c_void_p), ("positions", c_void_p), ("cos_sin", c_void_p),
    ("q", c_void_p), ("q_rope", c_void_p), ("q_scale", c_void_p),
    ("content_token", c_int64), ("content_head", c_int64), ("rope_token", c_int64), ("rope_head", c_int64),
    ("rows", c_int), ("heads", c_int), ("dim", c_int), ("rope_dim", c_int),
])  # fmt: skip
_AppendArgs = binding.struct("_AppendArgs", [
    ("latent", c_void_p), ("k_rope", c_void_p), ("weight", c_void_p), ("positions", c_void_p), ("cos_sin", c_void_p),
    ("slots", c_void_p), ("content", c_void_p), ("rope", c_void_p), ("scale", c_void_p),
    ("keep_latent", c_void_p), ("keep_rope", c_void_p),
    ("latent_stride", c_int64), ("rope_stride", c_int64),
    ("content_block", c_int64), ("rope_block", c_int64), ("scale_block", c_int64),
    ("tokens", c_int), ("keep", c_int), ("dim", c_int), ("rope_dim", c_int), ("weight_fp32", c_int), ("num_blocks", c_int),
    ("eps", c_float),
    ("copy_starts", c_void_p), ("copy_content", c_void_p), ("copy_rope", c_void_p), ("copy_slots", c_int64),
])  # fmt: skip
_FetchArgs = binding.struct("_FetchArgs", [
    ("content", c_void_p), ("rope", c_void_p), ("scale", c_void_p), ("block_table", c_void_p), ("starts", c_void_p),
    ("cu_lens", c_void_p), ("latent", c_void_p), ("key", c_void_p),
    ("content_block", c_int64), ("rope_block", c_int64), ("scale_block", c_int64), ("table_stride", c_int64),
    ("total", c_int), ("sequences", c_int), ("dim", c_int), ("rope_dim", c_int), ("table_width", c_int), ("num_blocks", c_int),
])  # fmt: skip


def _launch(
    op: str, dtype: torch.dtype, fmt: CacheFormat, device: torch.device, rows: int, args: ctypes.Structure, form: str = ""
) -> None:
    if rows == 0:
        return
    grid = -(-rows // WARPS)
    if op == "append_kv" and fmt is CacheFormat.FP8:  # its warps walk over the rows
        grid = min(grid, _APPEND_CTAS * binding.sm_count(device.index))
    elif op == "fetch_dequant" and fmt is CacheFormat.FP8:
        grid = -(-grid // _FETCH_ROWS)
    with torch.cuda.device(device):
        kernel = binding.kernel("latent", f"{op}_{_NAMES[dtype]}_{fmt.value}{form}", device.index, beside=rows <= _FEW_ROWS)
        kernel.launch(grid, 32 * WARPS, args, overlap=True)


def _require(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise KernelContractError(op, message)


def _vectors(x: torch.Tensor) -> torch.Tensor:
    """x itself when every row starts on a 16-byte boundary, else a dense copy."""
    aligned = x.data_ptr() % 16 == 0 and all(s * x.itemsize % 16 == 0 for s in x.stride()[:-1])
    return x if aligned else x.contiguous()


def _same_dtype(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the wider dtype; widening BF16 is exact."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _check_tables(op: str, device: torch.device, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    _require(positions.device == device and positions.is_contiguous(), op, f"positions must be contiguous on {device}")
    _require(cos_sin.device == device and cos_sin.is_contiguous(), op, f"cos_sin must be contiguous on {device}")


def _check_cache(op: str, cache: LatentCache, device: torch.device) -> None:
    for name, part in {"content": cache.content, "rope": cache.rope, "scale": cache.scale}.items():
        if part is None:
            continue
        _require(part.device == device, op, f"cache.{name} is on {part.device}, expected {device}")
        dense = part.stride(-1) == 1 and (part.ndim == 2 or part.stride(1) == part.shape[2])
        _require(dense, op, f"cache.{name}'s tokens must be dense within a block")
        if cache.format is CacheFormat.FP8 and name != "scale":
            aligned = part.data_ptr() % 16 == 0 and part.stride(0) * part.itemsize % 16 == 0
            _require(aligned, op, f"cache.{name} and its block stride must be aligned to 16 bytes")


def quantize_q(
    q_content: torch.Tensor, q_rope: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, fmt: CacheFormat
) -> LatentQuery:
    """See ops.quantize_q."""
    op, device = "quantize_q", q_content.device
    tokens, heads, dim = q_content.shape
    rope_dim = q_rope.shape[2]
    _check_tables(op, device, positions, cos_sin)
    fp8 = fmt is CacheFormat.FP8
    _require(
        not fp8 or (dim, rope_dim) == (FP8_LATENT_DIM, FP8_ROPE_DIM),
        op,
        f"the fp8 format has 512 + 64 dims, got {dim} + {rope_dim}",
    )
    q_content, q_rope = _same_dtype(q_content, q_rope)
    if fp8:
        q_content = _vectors(q_content)
    query = LatentQuery(
        content=torch.empty(tokens, heads, dim, dtype=fmt.content_dtype, device=device),
        rope=torch.empty(tokens, heads, rope_dim, dtype=fmt.rope_dtype, device=device),
        scale=torch.empty(tokens, heads, device=device) if fp8 else None,
    )
    args = _QuantizeQArgs(
        q_content.data_ptr(), q_rope.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(),
        query.content.data_ptr(), query.rope.data_ptr(), binding.pointer(query.scale),
        q_content.stride(0), q_content.stride(1), q_rope.stride(0), q_rope.stride(1), tokens * heads, heads, dim, rope_dim,
    )  # fmt: skip
    _launch(op, q_content.dtype, fmt, device, tokens * heads, args)
    return query


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
    """See ops.append_kv. Slots outside the pool are skipped like -1."""
    op, device = "append_kv", latent.device
    tokens, dim = latent.shape
    rope_dim = k_rope.shape[1]
    _check_tables(op, device, positions, cos_sin)
    _check_cache(op, cache, device)
    _require(slots.device == device and slots.is_contiguous(), op, f"slots must be contiguous on {device}")
    _require(norm_weight.device == device and norm_weight.is_contiguous(), op, f"norm_weight must be contiguous on {device}")
    _require(
        norm_weight.dtype in _NAMES and norm_weight.data_ptr() % 16 == 0,
        op,
        "norm_weight must be BF16 or FP32, aligned to 16 bytes",
    )
    copied: tuple[int | None, int | None, int | None, int] = (None, None, None, 0)
    if copy is not None:
        _require(copy.cache.format is CacheFormat.BF16, op, f"copy must be BF16 on a GPU, got {copy.cache.format.value}")
        _require(
            copy.starts.device == device and copy.starts.is_contiguous(), op, f"copy.starts must be contiguous on {device}"
        )
        _check_cache(op, copy.cache, device)
        content, rope = copy.cache.content.data_ptr(), copy.cache.rope.data_ptr()
        copied = copy.starts.data_ptr(), content, rope, copy.cache.num_blocks * BLOCK_SIZE
    dtype = latent.dtype
    latent, k_rope = _same_dtype(latent, k_rope)
    if cache.format is CacheFormat.FP8:
        latent = _vectors(latent)
    keep_latent = torch.empty(keep, dim, dtype=latent.dtype, device=device)
    keep_rope = torch.empty(keep, rope_dim, dtype=latent.dtype, device=device)
    args = _AppendArgs(
        latent.data_ptr(), k_rope.data_ptr(), norm_weight.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), slots.data_ptr(),
        cache.content.data_ptr(), cache.rope.data_ptr(), binding.pointer(cache.scale), keep_latent.data_ptr(), keep_rope.data_ptr(),
        latent.stride(0), k_rope.stride(0), cache.content.stride(0), cache.rope.stride(0),
        0 if cache.scale is None else cache.scale.stride(0),
        tokens, keep, dim, rope_dim, int(norm_weight.dtype is torch.float32), cache.num_blocks, eps, *copied,
    )  # fmt: skip
    _launch(op, latent.dtype, cache.format, device, tokens, args, form="_copy" if copy is not None else "")
    return keep_latent.to(dtype), keep_rope.to(dtype)


def fetch_dequant(
    cache: LatentCache,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    cu_lens: torch.Tensor,
    *,
    total: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.fetch_dequant."""
    op, device = "fetch_dequant", cache.content.device
    _check_cache(op, cache, device)
    _require(block_table.stride(1) == 1 or block_table.shape[1] <= 1, op, "block_table's last dimension must be dense")
    _require(starts.is_contiguous() and cu_lens.is_contiguous(), op, "starts and cu_lens must be contiguous")
    _require(total == 0 or block_table.shape[1] > 0, op, "block_table is empty")
    latent = torch.empty(total, cache.latent_dim, dtype=dtype, device=device)
    key = torch.empty(total, cache.rope_dim, dtype=dtype, device=device)
    args = _FetchArgs(
        cache.content.data_ptr(), cache.rope.data_ptr(), binding.pointer(cache.scale), block_table.data_ptr(), starts.data_ptr(),
        cu_lens.data_ptr(), latent.data_ptr(), key.data_ptr(),
        cache.content.stride(0), cache.rope.stride(0), 0 if cache.scale is None else cache.scale.stride(0), block_table.stride(0),
        total, block_table.shape[0], cache.latent_dim, cache.rope_dim, block_table.shape[1], cache.num_blocks,
    )  # fmt: skip
    _launch(op, dtype, cache.format, device, total, args)
    return latent, key
