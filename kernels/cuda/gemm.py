"""Dense products on Hopper, and the activation quantization that FP8 weights ask for.

Block-scaled FP8 weights, by tokens: up to 64 a kernel that gives every SM its own weight rows (csrc/gemm/rows.cu), more
through torch's block-scaled product; where a shape fits neither, or torch's is slow, a kernel that gives every SM an equal
run of weight blocks (csrc/gemm/stream.cuh), which also serves the experts. BF16 and FP32 weights are torch's.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from kernels.cuda import binding
from kernels.errors import KernelContractError
from kernels.layout import FP8, WEIGHT_BLOCK, Activation, BlockScaledWeight, QuantizedActivation, Rows, Weight, plain_rows

TOKEN_TILES = (8, 16, 32, 64, 128)  # one kernel each
TILE_ROWS, _UNIT = 128, 2  # TILE_ROWS, UNIT of csrc/gemm/stream.cuh
WEIGHT_PROMOTION = 128  # bytes of a weight row that L2 fetches at once
ROWS_TOKENS = (16, 32, 64)  # tokens of the tile of csrc/gemm/rows.cu
ROWS_MAX_TOKENS = ROWS_TOKENS[-1]
_NARROW = 4096  # up to this N torch's product, which does not split K either, leaves SMs idle at 65 .. 128 tokens
_STREAM_THREADS, _ROWS_THREADS, _THREADS = 288, 320, 256
_BLOCKS_A_CTA, _COLUMNS_A_CTA = 16, 1024  # BLOCKS_A_CTA of quantize.cuh, COLUMNS_A_CTA of finish.cu
_MANY_CTAS = 8192  # of 16 blocks of 128 channels; more than that are quantized several groups a CTA
_GROUPS_A_CTA = {"quantize_many_bf16": 4, "silu_mul_quantize_many_bf16": 2}  # EACH of csrc/gemm/quantize.cu
_LONG = 64  # blocks of K of a long product
_LONGEST = 128  # of a CTA: their scales then take a quarter of its shared memory
_LEAST_UNITS = 2  # of 32 KB of weights that a CTA must have: fewer CTAs on a small weight mean fewer partial sums


class QuantizedArgs(ctypes.Structure):
    """Quantized of csrc/gemm/quantize.cuh."""

    _fields_ = (("codes", c_void_p), ("scales", c_void_p), ("width", c_int), ("scale_stride", c_int))


class ProductArgs(ctypes.Structure):
    """Product of csrc/gemm/schedule.cuh, its Schedule flattened."""

    _fields_ = (
        ("tile_rows", c_int), ("row_tiles", c_int), ("k_units", c_int), ("ctas", c_int), ("token_tile", c_int),
        ("n", c_int), ("partial", c_void_p), ("out", c_void_p),
    )  # fmt: skip


class _QuantizeArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("to", QuantizedArgs),
        ("x_stride", c_int64),
        ("live", c_void_p),
        ("rows", c_int),
        ("_pad", c_int),
    )


class _StreamArgs(ctypes.Structure):
    _fields_ = (
        ("w", binding.TensorMap), ("x", binding.TensorMap), ("x_scale", binding.TensorMap),
        ("w_scale", c_void_p), ("out", c_void_p), ("partial", c_void_p), ("groups", c_void_p),
        ("experts", c_int), ("rows", c_int), ("n", c_int), ("row_tiles", c_int), ("k_blocks", c_int),
        ("scale_rows", c_int), ("out_fp32", c_int), ("_pad", c_int),
    )  # fmt: skip


class _RowsArgs(ctypes.Structure):
    _fields_ = (
        ("w", binding.TensorMap), ("x", binding.TensorMap), ("x_scale", binding.TensorMap), ("w_scale", c_void_p), ("out", c_void_p),
        ("rows", c_int), ("n", c_int), ("k_blocks", c_int), ("scale_rows", c_int), ("tokens", c_int), ("scale_blocks", c_int),
        ("out_fp32", c_int), ("_pad", c_int * 5),
    )  # fmt: skip


class _FinishArgs(ctypes.Structure):
    _fields_ = (("product", ProductArgs), ("rows", c_int), ("_pad", c_int))


# ---- activation quantization ------------------------------------------------------------------------------------


def quantize_1x128(x: torch.Tensor) -> QuantizedActivation:
    """x BF16|FP32 [T, K] in E4M3 with one scale per token and 128 channels; amax floored at 1e-4. K a multiple of 16."""
    op = "quantize_1x128"
    _require_rows(op, x)
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise KernelContractError(op, f"x must be BF16 or FP32, got {x.dtype}")
    q = empty_activation(x.shape[0], x.shape[1], x.device)
    _quantize("quantize", x, q)
    return q


def silu_and_mul_quantized(gate_up: torch.Tensor, live: torch.Tensor | None = None) -> QuantizedActivation:
    """`ops.silu_and_mul` of BF16 [T, 2 I], rounded to BF16, then quantized like `quantize_1x128`.

    live: int32 [1] on the device, how many rows there are; the others' results hold anything
    """
    op = "silu_and_mul_quantized"
    _require_rows(op, gate_up)
    width = gate_up.shape[1] // 2
    if gate_up.dtype is not torch.bfloat16 or gate_up.shape[1] % 32:
        raise KernelContractError(
            op, f"gate_up must be BF16 [T, 2 I] with I a multiple of 16, got {gate_up.dtype} {tuple(gate_up.shape)}"
        )
    q = empty_activation(gate_up.shape[0], width, gate_up.device)
    _quantize("silu_mul_quantize", gate_up, q, live)
    return q


def _quantize(name: str, x: torch.Tensor, q: QuantizedActivation, live: torch.Tensor | None = None) -> None:
    rows, width = q.data.shape
    if rows == 0:
        return
    grid, form = block_grid(rows, width), "bf16" if x.dtype is torch.bfloat16 else "fp32"
    if grid > _MANY_CTAS and f"{name}_many_{form}" in _GROUPS_A_CTA:
        name = f"{name}_many"
        grid = -(-grid // _GROUPS_A_CTA[f"{name}_{form}"])
    args = _QuantizeArgs(x.data_ptr(), quantized_args(q), x.stride(0), binding.pointer(live), rows, 0)
    _launch("quantize", f"{name}_{form}", x.device, grid, _THREADS, args, overlap=True)


def empty_activation(rows: int, width: int, device: torch.device) -> QuantizedActivation:
    """Room for `rows` rows. Scales lie token-adjacent: the layout of the tensor maps and of torch's scaled product."""
    padded = -(-rows // 4) * 4
    scale = torch.empty(-(-width // WEIGHT_BLOCK), padded, device=device)
    return QuantizedActivation(torch.empty(padded, width, dtype=FP8, device=device)[:rows], scale.t()[:rows])


def quantized_args(q: QuantizedActivation) -> QuantizedArgs:
    return QuantizedArgs(q.data.data_ptr(), q.scale.data_ptr(), q.data.shape[1], q.scale.stride(1))


def block_grid(rows: int, width: int) -> int:
    """CTAs of the kernels with sixteen lanes a row and block of 128 channels."""
    return rows * -(-width // (WEIGHT_BLOCK * _BLOCKS_A_CTA))


def _require_rows(op: str, x: torch.Tensor) -> None:
    if x.ndim != 2 or x.stride(1) != 1 or x.shape[1] % 16:
        raise KernelContractError(op, f"rows must be [T, K] with dense columns and K a multiple of 16, got {tuple(x.shape)}")
    if x.data_ptr() % 16 or x.stride(0) * x.itemsize % 16:
        raise KernelContractError(op, "rows must be aligned to 16 bytes")


# ---- products ---------------------------------------------------------------------------------------------------


def linear(x: Rows, weight: Weight) -> torch.Tensor:
    """See ops.linear."""
    if not isinstance(weight, BlockScaledWeight):
        return F.linear(plain_rows(x), weight)
    if isinstance(x, Activation):
        return linear_quantized(x.quantized, weight, x.dtype)
    n, k = weight.data.shape
    rows = x.reshape(-1, k)
    if rows.data_ptr() % 16 or rows.stride(-1) != 1 or rows.stride(0) * rows.itemsize % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return linear_quantized(quantize_1x128(rows), weight, x.dtype).reshape(*x.shape[:-1], n)


def linear_quantized(x: QuantizedActivation, weight: BlockScaledWeight, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T in `dtype`, BF16 or FP32.

    Up to ROWS_MAX_TOKENS tokens a row's bits do not depend on its batch.
    """
    check_weight("linear", weight.data, weight.scale)
    rows, k = x.data.shape
    n, device = weight.data.shape[0], x.data.device
    load_products("fp8", device.index)
    cut = slices(n, k, binding.sm_count(device.index))
    if cut is not None:
        _rows_kernel(cut, ROWS_MAX_TOKENS, device.index)
    if rows == 0:
        return torch.empty(0, n, dtype=dtype, device=device)
    if cut is not None and rows <= ROWS_MAX_TOKENS:
        return _product_rows(cut, x, weight, dtype)
    if rows > (TOKEN_TILES[-1] if n <= _NARROW else ROWS_MAX_TOKENS) and takes_scaled_mm(n, k, dtype):
        return scaled_mm(x, weight)
    return _dense(x.data, x.scale, weight.data, weight.scale, dtype)


class Slices(NamedTuple):
    """How csrc/gemm/rows.cu is built for a weight: rows of a cluster's slice, CTAs that share its K, CTAs an SM."""

    rows: int
    split: int
    resident: int

    def blocks(self, tokens: int) -> int:
        """Blocks of K that are fetched at once. Bits do not depend on it."""
        return 1 if self.resident == 2 and tokens > ROWS_TOKENS[1] else 2

    def defines(self, tokens: int) -> tuple[tuple[str, int], ...]:
        return ("ROWS", self.rows), ("SPLIT", self.split), ("RESIDENT", self.resident), ("BLOCKS", self.blocks(tokens))


def slices(n: int, k: int, ctas: int) -> Slices | None:
    """Every SM gets an equal share of the weight; None where that kernel does not fit.

    Of a low slice K is split, since its tokens are then read once for more rows; four ways only where few rows are left, since
    adding up takes its time. Two CTAs an SM let a product begin under the one before it; a long one gains more by deep rings.
    """
    k_blocks = k // WEIGHT_BLOCK
    share = -(-n // (8 * ctas)) * 8
    if k % WEIGHT_BLOCK or k_blocks > (_LONGEST if share > 64 else 2 * _LONGEST):
        return None
    if share > 64:
        half = -(-share // 32) * 16
        return Slices(half, 1, 2) if half <= 144 else None
    if k_blocks >= _LONG:
        return Slices(2 * share, 2, 1)
    for split, most in ((4, 32), (2, 64)):
        if share * split <= most and k_blocks >= 8 * split:
            return Slices(share * split, split, 2)
    return Slices(64 if share > 48 else share, 1, 2)


def _product_rows(cut: Slices, x: QuantizedActivation, weight: BlockScaledWeight, dtype: torch.dtype) -> torch.Tensor:
    rows, k = x.data.shape
    n, k_blocks, device = weight.data.shape[0], k // WEIGHT_BLOCK, x.data.device
    tokens = next(t for t in ROWS_TOKENS if t >= rows)
    out = torch.empty(rows, n, dtype=dtype, device=device)
    args = _RowsArgs()
    blocks = cut.blocks(tokens)
    box = (WEIGHT_BLOCK, cut.rows, blocks)
    args.w = _map(weight.data, (WEIGHT_BLOCK, n, k_blocks), (k, WEIGHT_BLOCK), box, WEIGHT_PROMOTION)
    args.x = _map(x.data, (WEIGHT_BLOCK, rows, k_blocks), (k, WEIGHT_BLOCK), (WEIGHT_BLOCK, tokens, blocks))
    scale_blocks = 2 * -(-k_blocks // (2 * cut.split))
    args.x_scale = _scale_map(x.scale, (tokens, scale_blocks))
    args.w_scale, args.out = weight.scale.data_ptr(), out.data_ptr()
    args.rows, args.n, args.k_blocks, args.scale_rows = rows, n, k_blocks, weight.scale.shape[0]
    args.tokens, args.scale_blocks, args.out_fp32 = tokens, scale_blocks, int(dtype is torch.float32)
    kernel = _rows_kernel(cut, tokens, device.index)
    with torch.cuda.device(device):
        kernel.launch(-(-n // cut.rows) * cut.split, _ROWS_THREADS, args, cluster=cut.split, overlap=True)
    return out


@cache
def _rows_kernel(cut: Slices, tokens: int, device_index: int) -> binding.Kernel:
    """All of a cut's kernels are loaded at the first call, so that a later batch size may come up inside a graph capture."""
    return {t: binding.kernel("gemm_rows", "product_rows", device_index, cut.defines(t)) for t in ROWS_TOKENS}[tokens]


def takes_scaled_mm(n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether torch's block-scaled product takes the shape: it wants K blocks in fours."""
    return dtype is torch.bfloat16 and n % 16 == 0 and k % (4 * WEIGHT_BLOCK) == 0


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See ops.router_logits. Products of BF16 are exact in FP32, so a BF16 router on BF16 rows needs no FP32 product."""
    experts, width = weight.shape
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or experts % 4 or width % 16:
        return F.linear(x.float(), weight.float())
    x = x.contiguous()
    _require_rows("router_logits", x)
    check_weight("router_logits", weight, None)
    load_products("bf16", x.device.index)
    if x.shape[0] == 0:
        return torch.empty(0, experts, device=x.device)
    return _dense(x, None, weight, None, torch.float32)


def _dense(
    x: torch.Tensor, x_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    rows, n = x.shape[0], w.shape[0]
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    tile = token_tile(rows)
    product = stream(x, x_scale, w.unsqueeze(0), w_scale, out, token_tile=tile, groups=None)
    if _is_split(product.args, -(-rows // tile)):
        name = "finish_bf16" if dtype is torch.bfloat16 else "finish_fp32"
        _launch(
            "gemm_finish",
            name,
            x.device,
            rows * -(-n // _COLUMNS_A_CTA),
            _THREADS,
            _FinishArgs(product.args, rows),
            overlap=True,
        )
    return out


def token_tile(rows: int) -> int:
    """Token tile of a dense product."""
    return next((t for t in TOKEN_TILES if t >= rows), TOKEN_TILES[-1])


@dataclass(frozen=True)
class Product:
    """A streaming product as the kernels after it read it; `partial` keeps the workspace alive until they are enqueued."""

    args: ProductArgs
    partial: torch.Tensor


def stream(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    out: torch.Tensor,
    *,
    token_tile: int,
    groups: torch.Tensor | None,
) -> Product:
    """Launch the weight-streaming kernel: out [rows, N] = x [rows, K] @ w [E, N, K]^T, where one CTA holds a whole tile.

    x_scale, w_scale: of E4M3 operands, None for BF16. groups: int32 [2, E + 1] token offsets and token tiles of the
    experts, written by the sort; None for a dense product, whose first stages are fetched before x is ready.
    The kernel must follow the one that makes x (and groups).
    """
    experts, n, k = w.shape
    rows, fp8 = x.shape[0], x_scale is not None
    kind, width = ("fp8", 128) if fp8 else ("bf16", 64)
    k_blocks, ctas = -(-k // width), binding.sm_count(w.device.index)
    row_tiles, k_units = -(-n // TILE_ROWS), -(-k_blocks // _UNIT)
    if groups is None:
        ctas = max(1, min(ctas, row_tiles * -(-rows // token_tile) * k_units // _LEAST_UNITS))
    partial = torch.empty(ctas, 2, token_tile, TILE_ROWS, device=w.device)
    product = ProductArgs(TILE_ROWS, row_tiles, k_units, ctas, token_tile, n, partial.data_ptr(), out.data_ptr())
    args = _StreamArgs()
    args.w = _map(w, (k, n, experts), (k, n * k), (width, TILE_ROWS, 1), WEIGHT_PROMOTION)
    args.x = _map(x, (k, rows), (k,), (width, token_tile))
    if x_scale is not None and w_scale is not None:
        args.x_scale = _scale_map(x_scale, (token_tile, _UNIT))
        args.w_scale, args.scale_rows = w_scale.data_ptr(), w_scale.shape[-2]
    args.out, args.partial, args.groups = out.data_ptr(), partial.data_ptr(), binding.pointer(groups)
    args.experts, args.rows, args.n = experts, rows, n
    args.row_tiles, args.k_blocks, args.out_fp32 = row_tiles, k_blocks, int(out.dtype is torch.float32)
    _launch(f"gemm_{kind}", f"stream_{kind}_{token_tile}", w.device, ctas, _STREAM_THREADS, args, overlap=True)
    return Product(product, partial)


@cache
def load_products(kind: str, device_index: int) -> None:
    """Load every token tile of "fp8" or "bf16" products and what goes with them at the first call, so that a later
    batch size may come up inside a graph capture."""
    for token_tile in TOKEN_TILES:
        binding.kernel(f"gemm_{kind}", f"stream_{kind}_{token_tile}", device_index)
    for name in ("finish_bf16", "finish_fp32"):
        binding.kernel("gemm_finish", name, device_index)
    for name in ("quantize_bf16", "quantize_fp32"):
        binding.kernel("quantize", name, device_index)


def check_weight(op: str, data: torch.Tensor, scale: torch.Tensor | None) -> None:
    """What the tensor maps and the stores need of a weight [..., N, K]."""
    n, k = data.shape[-2:]
    if k * data.itemsize % 16 or n % 4:
        raise KernelContractError(
            op, f"the weight's rows must be a multiple of 16 bytes and N of 4, got N {n} and K {k} ({data.dtype})"
        )
    if not data.is_contiguous() or data.data_ptr() % 16:
        raise KernelContractError(op, "the weight must be contiguous and aligned to 16 bytes")
    if scale is not None:
        blocks = (*data.shape[:-2], -(-n // WEIGHT_BLOCK), -(-k // WEIGHT_BLOCK))
        if scale.shape != blocks or scale.dtype is not torch.float32 or not scale.is_contiguous():
            raise KernelContractError(
                op, f"the weight's scale must be contiguous FP32 {blocks}, got {scale.dtype} {tuple(scale.shape)}"
            )


def _map(
    t: torch.Tensor, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promotion: int = 128
) -> binding.TensorMap:
    """strides in elements."""
    strides = tuple(s * t.itemsize for s in strides)
    return binding.tensor_map("linear", t.data_ptr(), t.dtype, dims, strides, box, promotion=promotion)


def _scale_map(scale: torch.Tensor, box: tuple[int, int]) -> binding.TensorMap:
    """Of the scales of a QuantizedActivation; box: tokens, blocks."""
    return binding.tensor_map(
        "linear", scale.data_ptr(), scale.dtype, tuple(scale.shape), (4 * scale.stride(1),), box, swizzle=False
    )


def _is_split(product: ProductArgs, token_tiles: int) -> bool:
    """Whether any tile of a dense product lies in more than one CTA (Runs of csrc/gemm/schedule.cuh)."""
    each, extra = divmod(product.row_tiles * token_tiles * product.k_units, product.ctas)
    return any((c * each + min(c, extra)) % product.k_units for c in range(1, product.ctas))


def scaled_mm(x: QuantizedActivation, weight: BlockScaledWeight) -> torch.Tensor:
    """torch's block-scaled product: rows a multiple of 4 (empty_activation pads them), K blocks a multiple of 4."""
    rows, stride = x.data.shape[0], x.scale.stride(1)
    data = x.data.as_strided((stride, x.data.shape[1]), x.data.stride())
    scale = x.scale.as_strided((stride, x.scale.shape[1]), x.scale.stride())
    return F.scaled_mm(
        data, weight.data.t(), scale, ScalingType.BlockWise1x128, weight.scale.t(), ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[:rows]  # fmt: skip


def _launch(
    module: str, name: str, device: torch.device, grid: int, threads: int, args: ctypes.Structure, *, overlap: bool = False
) -> None:
    with torch.cuda.device(device):
        binding.kernel(module, name, device.index).launch(grid, threads, args, overlap=overlap)
