"""Split-KV plan, decode attention and combine on Hopper (csrc/mla_decode/): workspaces, checks, launches."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from kernels.cuda import binding
from kernels.errors import KernelContractError, KernelError
from kernels.layout import BLOCK_SIZE, FP8_LATENT_DIM, FP8_ROPE_DIM, CacheFormat, DecodePlan, LatentCache, LatentQuery

TILE_ROWS = 64
FP8_BUILDS = {16: "decode_fp8_16", 32: "decode_fp8_32", TILE_ROWS: "decode_fp8"}  # by TILE_N of csrc/mla_decode/fp8.cu
FP8_PAIR = "decode_fp8_pair"  # its build for clusters of two tiles
MAX_GROUP = 7  # tiles that walk the same keys at the same time; above it, groups of four
COMBINE_THREADS = 512  # 32 * WARPS of csrc/mla_decode/combine.cu
PLAN_THREADS = 256  # THREADS of csrc/mla_decode/plan.cu
INVARIANT_SPLITS = 8  # INVARIANT_SPLITS of csrc/mla_decode/plan.cu
_HEADER = 8  # ints before the group starts of the work list, WorkLayout::starts()


class _WorkLayout(ctypes.Structure):
    _fields_ = (("groups", c_int), ("max_pieces", c_int), ("max_items", c_int))


class _PlanArgs(ctypes.Structure):
    _fields_ = (
        ("seq_lens", c_void_p), ("work", c_void_p), ("layout", _WorkLayout),
        ("batch", c_int), ("units", c_int), ("invariant", c_int),
    )  # fmt: skip


class _DecodeArgs(ctypes.Structure):
    _fields_ = (
        ("content", binding.TensorMap), ("rope", binding.TensorMap), ("q_content", binding.TensorMap), ("q_rope", binding.TensorMap),
        ("scales", c_void_p), ("scale_stride", c_int64), ("block_table", c_void_p), ("table_stride", c_int64),
        ("num_query", c_void_p), ("work", c_void_p),
        ("q_scale", c_void_p), ("out", c_void_p), ("lse", c_void_p), ("partial_out", c_void_p), ("partial_lse", c_void_p),
        ("layout", _WorkLayout),
        ("table_width", c_int), ("num_pages", c_int), ("query_len", c_int), ("heads", c_int), ("group", c_int),
        ("out_fp32", c_int), ("causal", c_int), ("softmax_scale_log2", c_float), ("zero", c_int), ("_pad", c_int * 14),
    )  # fmt: skip


class PagedReadArgs(ctypes.Structure):
    """Arguments of the benchmark kernel paged_read; fill the maps with fill_maps."""

    _fields_ = (
        ("content", binding.TensorMap), ("rope", binding.TensorMap),
        ("scales", c_void_p), ("scale_stride", c_int64), ("pages", c_void_p), ("count", c_int), ("_pad", c_int * 9),
    )  # fmt: skip


class _CombineArgs(ctypes.Structure):
    _fields_ = (
        ("work", c_void_p), ("layout", _WorkLayout), ("group", c_int), ("rows", c_int), ("out_fp32", c_int),
        ("partial_out", c_void_p), ("partial_lse", c_void_p), ("out", c_void_p), ("lse", c_void_p),
    )  # fmt: skip


class Geometry:
    """How the query rows of a batch map to tiles and CTAs; a pure function of shapes and of the device.

    tiles: 64-row tiles of a sequence; group: tiles that run side by side on neighbouring CTAs; units: groups of tiles a
    sequence has; groups: CTA groups of the grid.
    """

    def __init__(self, batch: int, query_len: int, heads: int, sm_count: int, invariant: bool) -> None:
        self.batch, self.query_len, self.heads = batch, query_len, heads
        self.tiles = -(-query_len * heads // TILE_ROWS)
        self.group = self.tiles if self.tiles <= MAX_GROUP else 4
        self.units = -(-self.tiles // self.group)
        self.groups = sm_count // self.group
        virtual = batch * self.units
        self.max_pieces = virtual * INVARIANT_SPLITS if invariant else virtual + self.groups
        self.max_items = virtual
        self.max_slots = virtual * INVARIANT_SPLITS if invariant else 2 * self.groups

    @property
    def layout(self) -> _WorkLayout:
        return _WorkLayout(self.groups, self.max_pieces, self.max_items)

    @property
    def work_ints(self) -> int:
        pieces = (_HEADER + self.groups + 1 + 7) // 8 * 8
        return pieces + 8 * self.max_pieces + 4 * self.max_items


def plan_decode(
    seq_lens: torch.Tensor, *, query_len: int, num_heads: int, fmt: CacheFormat, batch_invariant: bool = False
) -> DecodePlan:
    """See ops.plan_decode. Workspace: 131 KB a partial tile; two tiles a CTA at most, or eight a sequence and tile when
    batch-invariant."""
    device = seq_lens.device
    if fmt is CacheFormat.FP32:
        raise KernelError(
            "plan_decode", "the Hopper kernels read fp8 and bf16 caches; run with the reference backend (--kernels reference)"
        )
    if not seq_lens.is_contiguous():
        raise KernelContractError("plan_decode", "seq_lens must be contiguous")
    g = Geometry(seq_lens.shape[0], query_len, num_heads, binding.sm_count(device.index), batch_invariant)
    work = torch.empty(g.work_ints, dtype=torch.int32, device=device)
    partial_out = torch.empty(g.max_slots * g.group, TILE_ROWS, FP8_LATENT_DIM, device=device)
    partial_lse = torch.empty(g.max_slots * g.group, TILE_ROWS, device=device)
    with torch.cuda.device(device):
        args = _PlanArgs(seq_lens.data_ptr(), work.data_ptr(), g.layout, g.batch, g.units, int(batch_invariant))
        binding.kernel("decode_plan", "plan_decode", device.index).launch(1, PLAN_THREADS, args)
    return DecodePlan(work, partial_out, partial_lse, batch_invariant)


def mla_decode(
    query: LatentQuery,
    cache: LatentCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_query: torch.Tensor | None = None,
    *,
    softmax_scale: float,
    causal: bool,
    plan: DecodePlan,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.mla_decode. The lengths are those the plan saw; a length beyond the block table is cut to its width."""
    op = "mla_decode"
    b, s, h, c = query.content.shape
    device = query.content.device
    _check(op, query, cache, block_table, num_query, plan)
    if not softmax_scale > 0 or not math.isfinite(softmax_scale):
        raise KernelContractError(op, f"softmax_scale must be positive and finite, got {softmax_scale}")
    assert plan.work is not None and plan.partial_out is not None and plan.partial_lse is not None
    g = Geometry(b, s, h, binding.sm_count(device.index), plan.batch_invariant)
    if plan.work.numel() != g.work_ints or plan.work.device != device:
        raise KernelContractError(op, f"plan was made for another batch, query length, head count or device than {(b, s, h)}")
    out = torch.empty(b, s, h, c, dtype=out_dtype, device=device)
    lse = torch.empty(b, s, h, dtype=torch.float32, device=device)
    if b == 0:
        return out, lse
    fp8 = cache.format is CacheFormat.FP8
    args = _DecodeArgs()
    fill_maps(op, args, cache)
    if fp8:
        assert cache.scale is not None and query.scale is not None
        args.scales, args.scale_stride = cache.scale.data_ptr(), cache.scale.stride(0)
        args.q_scale = query.scale.data_ptr()
    args.block_table, args.table_stride = block_table.data_ptr(), block_table.stride(0)
    args.num_query, args.work = binding.pointer(num_query), plan.work.data_ptr()
    _fill_query_maps(op, args, query)
    args.out, args.lse = out.data_ptr(), lse.data_ptr()
    args.partial_out, args.partial_lse = plan.partial_out.data_ptr(), plan.partial_lse.data_ptr()
    args.layout, args.table_width, args.num_pages = g.layout, block_table.shape[1], cache.num_blocks
    args.query_len, args.heads, args.group = s, h, g.group
    args.out_fp32, args.causal = int(out_dtype is torch.float32), int(causal)
    args.softmax_scale_log2 = softmax_scale * math.log2(math.e)
    combine = _CombineArgs(
        plan.work.data_ptr(), g.layout, g.group, s * h, args.out_fp32,
        plan.partial_out.data_ptr(), plan.partial_lse.data_ptr(), out.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    with torch.cuda.device(device):
        decode, cluster = _decode_kernel(g, cache.format, device.index)
        decode.launch(g.groups * g.group, 512, args, cluster=cluster, overlap=True)
        sms = binding.sm_count(device.index)
        binding.kernel("decode_combine", "combine_decode", device.index).launch(sms, COMBINE_THREADS, combine, overlap=True)
    return out, lse


def _decode_kernel(g: Geometry, fmt: CacheFormat, device_index: int) -> tuple[binding.Kernel, int]:
    """The decode kernel and its cluster size. fp8.cu is built for fewer rows, with less softmax and PV, and for an even number
    of tiles side by side, as pairs. All builds are loaded at the first call, so that another query length may come up inside
    a graph capture."""
    if fmt is not CacheFormat.FP8:
        return binding.kernel("decode_bf16", "mla_decode_bf16", device_index), 1
    kernels = {n: binding.kernel(module, "mla_decode_fp8", device_index) for n, module in FP8_BUILDS.items()}
    pair = binding.kernel(FP8_PAIR, "mla_decode_fp8", device_index)
    if g.group % 2 == 0:
        return pair, 2
    rows = g.query_len * g.heads
    return next(kernel for n, kernel in kernels.items() if rows <= n or n == TILE_ROWS), 1


def _check(
    op: str, query: LatentQuery, cache: LatentCache, block_table: torch.Tensor, num_query: torch.Tensor | None, plan: DecodePlan
) -> None:
    """What ops.mla_decode leaves to the backend: layout, alignment, supported widths."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise KernelContractError(op, message)

    if cache.format is CacheFormat.FP32 or (cache.latent_dim, cache.rope_dim) != (FP8_LATENT_DIM, FP8_ROPE_DIM):
        raise KernelError(
            op,
            f"the Hopper kernels read fp8 or bf16 caches of 512 + 64, this one is {cache.format.value} of {cache.latent_dim} + "
            f"{cache.rope_dim}; run with the reference backend (--kernels reference)",
        )
    require(plan.work is not None, "plan comes from the reference backend; make it with the same backend")
    require(query.content.is_contiguous(), "query.content must be contiguous")
    require(query.rope.is_contiguous(), "query.rope must be contiguous")
    require(query.rope.dtype == torch.bfloat16, f"query.rope must be BF16, got {query.rope.dtype}")
    require(cache.rope.dtype == torch.bfloat16, f"cache.rope must be BF16, got {cache.rope.dtype}")
    require(cache.num_blocks > 0, "cache has no blocks")
    require(block_table.stride(1) == 1 or block_table.shape[1] <= 1, "block_table's last dimension must be dense")
    require(num_query is None or num_query.is_contiguous(), "num_query must be contiguous")
    device = query.content.device
    parts = {"content": cache.content, "rope": cache.rope, "scale": cache.scale}
    for name, part in parts.items():
        if part is None:
            continue
        require(part.device == device, f"cache.{name} is on {part.device}, the query on {device}")
        require(
            part.shape[:2] == (cache.num_blocks, BLOCK_SIZE),
            f"cache.{name} must be [{cache.num_blocks}, 64, ...], got {tuple(part.shape)}",
        )
        dense = part.stride(-1) == 1 and (part.ndim == 2 or part.stride(1) == part.shape[2])
        require(dense, f"cache.{name}'s tokens must be dense within a block")
        require(
            part.data_ptr() % 16 == 0 and part.stride(0) * part.itemsize % 16 == 0,
            f"cache.{name} and its block stride must be aligned to 16 bytes",
        )
    for name, part in {"content": query.content, "rope": query.rope}.items():
        require(part.data_ptr() % 16 == 0, f"query.{name} must be aligned to 16 bytes")
    if query.scale is not None:
        require(cache.scale is not None and cache.scale.dtype == torch.float32, "cache.scale must be FP32")
        require(query.scale.dtype == torch.float32 and query.scale.is_contiguous(), "query.scale must be FP32 and contiguous")
        require(
            query.scale.shape == query.content.shape[:3],
            f"query.scale must be {tuple(query.content.shape[:3])}, got {tuple(query.scale.shape)}",
        )


def fill_maps(op: str, args: _DecodeArgs | PagedReadArgs, cache: LatentCache) -> None:
    """Tensor maps of the pool: {dims of a 128-byte row, 64 tokens, rows of a token, pages}."""
    content, rope = cache.content, cache.rope
    token_bytes, element = cache.latent_dim * content.itemsize, content.itemsize
    args.content = binding.tensor_map(
        op, content.data_ptr(), content.dtype,
        (128 // element, BLOCK_SIZE, token_bytes // 128, cache.num_blocks),
        (token_bytes, 128, content.stride(0) * element), (128 // element, BLOCK_SIZE, 1, 1),
    )  # fmt: skip
    args.rope = binding.tensor_map(
        op, rope.data_ptr(), rope.dtype, (cache.rope_dim, BLOCK_SIZE, cache.num_blocks),
        (cache.rope_dim * rope.itemsize, rope.stride(0) * rope.itemsize), (cache.rope_dim, BLOCK_SIZE, 1),
    )  # fmt: skip


def _fill_query_maps(op: str, args: _DecodeArgs, query: LatentQuery) -> None:
    """Tensor maps of the query: {dims of a 128-byte row, rows of a sequence, such rows side by side, sequences}; a tile is 64
    rows, zeros where the sequence has fewer."""
    content, rope = query.content, query.rope
    sequences, rows = content.shape[0], content.shape[1] * content.shape[2]
    row_bytes, rope_bytes = content.shape[-1] * content.itemsize, rope.shape[-1] * rope.itemsize
    args.q_content = binding.tensor_map(
        op, content.data_ptr(), content.dtype, (128 // content.itemsize, rows, row_bytes // 128, sequences),
        (row_bytes, 128, rows * row_bytes), (128 // content.itemsize, TILE_ROWS, 1, 1),
    )  # fmt: skip
    args.q_rope = binding.tensor_map(
        op, rope.data_ptr(), rope.dtype, (rope.shape[-1], rows, sequences), (rope_bytes, rows * rope_bytes),
        (rope.shape[-1], TILE_ROWS, 1),
    )  # fmt: skip
