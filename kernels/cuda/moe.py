"""Expert choice and the grouped expert MLP on Hopper: six launches, no host read, safe in a captured graph.

sort (pairs by expert) -> scatter (quantized rows to their places) -> gate_up product -> SiLU and quantization ->
down product -> weighted sum. The products are the weight-streaming kernel of `gemm.stream` with one group an expert, so
a step reads each hit expert's weights once, and ids that are not local cost nothing.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.cuda import binding, gemm
from kernels.cuda.elementwise import silu_and_mul
from kernels.errors import KernelContractError
from kernels.layout import FP8, WEIGHT_BLOCK, BlockScaledWeight, QuantizedActivation, Routing, Rows, Weight

MAX_EXPERTS = 512  # local experts; MAX_EXPERTS of csrc/gemm/schedule.cuh
MAX_PAIRS = 32768  # token and expert pairs of a pass of the streaming products: a workspace of about 1 GB for DeepSeek-V3
_STREAMED_TOKENS = 2048  # more than that, as prompts bring, are worth the kernel that is bound by arithmetic
_MOST_ROWS = 73728  # pairs of a pass of that kernel: a workspace of 1.3 GB
_PARTS = 128  # of the tokens, which a pass takes whole
_MANY_CTAS, _GROUPS_A_CTA = 8192, 4  # more CTAs of the scattering kernel take several groups each, EACH of csrc/moe/experts.cu
_BLOCK_ROWS, _TILE_ROWS = 64, 256  # BLOCK, TILE_ROWS of csrc/moe/grouped.cu
_MAX_ROUTED = 1024  # experts a router may choose from
_ROW_ALIGNMENT = 4  # an expert's first row: TMA takes scales from 16-byte boundaries only
_SORT_THREADS, _ROUTE_WARPS, _THREADS = 1024, 4, 256
_GATED_ROWS = 2  # rows an SM that the activation's kernel takes at once
_COMBINE_THREADS, _COMBINED_COLUMNS = 128, 1024  # COMBINE_THREADS, COLUMNS_A_CTA of csrc/moe/experts.cu
# Of csrc/moe/router.cu; more tokens are worth a kernel that reads the router once.
_ROUTER_PARTS, _ROUTER_EXPERTS, _ROUTER_TOKENS, _ROUTER_CHUNK, _ROUTER_MOST_TOKENS = 4, 8, 16, 32, 128


class _RouteArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p), ("bias", c_void_p), ("live", c_void_p), ("weights", c_void_p), ("ids", c_void_p),
        ("tokens", c_int), ("experts", c_int), ("top_k", c_int), ("groups", c_int), ("top_groups", c_int),
        ("sigmoid", c_int), ("normalize", c_int), ("scaling_factor", c_float), ("parts", c_int), ("row_stride", c_int),
    )  # fmt: skip


class _RouterArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p), ("w", c_void_p), ("parts", c_void_p), ("tokens", c_int), ("experts", c_int), ("width", c_int), ("_pad", c_int),
    )  # fmt: skip


class _Pairs(ctypes.Structure):
    """Pairs of csrc/moe/sort.cu."""

    _fields_ = (
        ("ids", c_void_p), ("groups", c_void_p), ("places", c_void_p), ("row_experts", c_void_p),
        ("pairs", c_int), ("first_expert", c_int), ("experts", c_int), ("token_tile", c_int), ("top_k", c_int), ("ids_stride", c_int),
        ("load", c_void_p), ("alignment", c_int), ("_pad", c_int),
    )  # fmt: skip


class _PartsArgs(ctypes.Structure):
    _fields_ = (("all", _Pairs), ("counts", c_void_p), ("totals", c_void_p), ("part", c_int), ("_pad", c_int))


class _GroupedArgs(ctypes.Structure):
    _fields_ = (
        ("w", binding.TensorMap), ("x", binding.TensorMap), ("x_scale", binding.TensorMap), ("out", binding.TensorMap),
        ("w_scale", c_void_p), ("groups", c_void_p),
        ("experts", c_int), ("row_pairs", c_int), ("k_blocks", c_int), ("scale_rows", c_int), ("_pad", c_int * 8),
    )  # fmt: skip


class _SumArgs(ctypes.Structure):
    _fields_ = (
        ("each", c_void_p), ("places", c_void_p), ("weights", c_void_p), ("out", c_void_p),
        ("width", c_int), ("top_k", c_int), ("weights_stride", c_int), ("_pad", c_int),
    )  # fmt: skip


class _ScatterArgs(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p), ("places", c_void_p), ("to", gemm.QuantizedArgs), ("copy", c_void_p), ("top_k", c_int), ("_pad", c_int),
    )  # fmt: skip


class _ScatterCodesArgs(ctypes.Structure):
    _fields_ = (
        ("codes", c_void_p), ("scales", c_void_p), ("places", c_void_p), ("to", gemm.QuantizedArgs),
        ("codes_stride", c_int64), ("scale_row_stride", c_int64), ("scale_block_stride", c_int64), ("top_k", c_int), ("_pad", c_int),
    )  # fmt: skip


class _GateArgs(ctypes.Structure):
    _fields_ = (
        ("product", gemm.ProductArgs), ("groups", c_void_p), ("row_experts", c_void_p), ("to", gemm.QuantizedArgs),
        ("copy", c_void_p), ("experts", c_int), ("_pad", c_int),
    )  # fmt: skip


class _CombineArgs(ctypes.Structure):
    _fields_ = (
        ("product", gemm.ProductArgs), ("groups", c_void_p), ("ids", c_void_p), ("places", c_void_p), ("weights", c_void_p),
        ("out", c_void_p), ("first_expert", c_int), ("experts", c_int), ("top_k", c_int), ("ids_stride", c_int),
        ("weights_stride", c_int), ("_pad", c_int),
    )  # fmt: skip


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.route."""
    kind = _Kind(scoring, top_k, num_groups, top_groups, normalize, scaling_factor)
    routing = _route(logits.contiguous().unsqueeze(0), bias, None, kind)
    return routing.weights, routing.ids


def choose_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    live: torch.Tensor | None = None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scaling_factor: float,
) -> Routing:
    """See ops.choose_experts."""
    kind = _Kind(scoring, top_k, num_groups, top_groups, normalize, scaling_factor)
    return _route(_router_parts(x, router), bias, live, kind)


class _Kind(NamedTuple):
    """How a family's router chooses; see ops.route."""

    scoring: str
    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scaling_factor: float


def _router_parts(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """FP32 [parts, T, E], whose sum over the parts is ops.router_logits."""
    tokens, (experts, width) = x.shape[0], router.shape
    dense_bf16 = x.dtype is router.dtype is torch.bfloat16 and x.is_contiguous() and router.is_contiguous()
    if not dense_bf16 or experts % _ROUTER_EXPERTS or width % _ROUTER_CHUNK or not 0 < tokens <= _ROUTER_MOST_TOKENS:
        return gemm.router_logits(x, router).unsqueeze(0)
    parts = torch.empty(_ROUTER_PARTS, tokens, experts, device=x.device)
    args = _RouterArgs(x.data_ptr(), router.data_ptr(), parts.data_ptr(), tokens, experts, width)
    grid = experts // _ROUTER_EXPERTS * _ROUTER_PARTS * -(-tokens // _ROUTER_TOKENS)
    _launch("router", "router_parts", x.device, grid, _THREADS, args, overlap=True)
    return parts


def _route(parts: torch.Tensor, bias: torch.Tensor | None, live: torch.Tensor | None, kind: _Kind) -> Routing:
    """parts: contiguous FP32 [parts, T, E]."""
    count, tokens, experts = parts.shape
    if experts > _MAX_ROUTED or kind.top_k > 32 or kind.num_groups > 32:
        raise KernelContractError(
            "route",
            f"at most {_MAX_ROUTED} experts, 32 choices and 32 groups, got {experts}, {kind.top_k} and {kind.num_groups}",
        )
    if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
        raise KernelContractError("route", f"bias must be contiguous FP32, got {bias.dtype}")
    if live is not None and not live.is_contiguous():
        raise KernelContractError("route", "live must be contiguous")
    routing = Routing(torch.empty(tokens, 2 * kind.top_k, dtype=torch.int32, device=parts.device))
    if tokens == 0:
        return routing
    args = _RouteArgs(
        parts.data_ptr(), binding.pointer(bias), binding.pointer(live), routing.weights.data_ptr(), routing.ids.data_ptr(),
        tokens, experts, kind.top_k, kind.num_groups, kind.top_groups, int(kind.scoring == "sigmoid"), int(kind.normalize),
        kind.scaling_factor, count, routing.packed.stride(0),
    )  # fmt: skip
    size = next(s for s in (256, 512, 1024) if s >= experts)
    _launch("route", f"route_{size}", parts.device, -(-tokens // _ROUTE_WARPS), 32 * _ROUTE_WARPS, args, overlap=True)
    return routing


def grouped_mlp(
    x: Rows,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    first_expert: int,
    load: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.grouped_mlp. More than MAX_PAIRS pairs run in several passes over the experts."""
    op = "grouped_mlp"
    tokens, top_k = ids.shape
    if x.dtype is torch.float32:
        if not isinstance(x, torch.Tensor):
            raise KernelContractError(op, "rows that come quantized are those of BF16 activations")
        if load is not None:
            local = torch.arange(first_expert, first_expert + len(load), device=ids.device)
            load += (ids.flatten() == local[:, None]).sum(dim=1)
        return _grouped_mlp_fp32(x, weights, ids, gate_up, down, first_expert)
    for weight in (gate_up, down):
        data, scale = _parts(weight)
        if scale is None and data.dtype is not torch.bfloat16:
            raise KernelContractError(
                op, f"expert weights must be BF16 or block-scaled FP8 beside BF16 activations, got {data.dtype}"
            )
        gemm.check_weight(op, data, scale)
    experts, _, hidden = _parts(gate_up)[0].shape
    if experts > MAX_EXPERTS:
        raise KernelContractError(op, f"at most {MAX_EXPERTS} local experts, got {experts}")
    if hidden % 16 or _parts(down)[0].shape[2] % 16:
        raise KernelContractError(
            op, f"hidden and expert width must be multiples of 16, got {hidden} and {_parts(down)[0].shape[2]}"
        )
    device = ids.device
    for weight in (gate_up, down):
        gemm.load_products(_kind(_parts(weight)[1]), device.index)
    if isinstance(x, torch.Tensor):
        x = x.contiguous()
    elif x.quantized.data.stride(1) != 1 or x.quantized.data.stride(0) % 8 or x.quantized.data.data_ptr() % 8:
        raise KernelContractError(op, "codes of a row must be dense, and rows begin at multiples of 8 bytes")
    weights = weights.float()
    if ids.stride(1) != 1 or weights.stride(1) != 1:
        raise KernelContractError(op, "the choices of a row must be dense")
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=device)
    many = tokens > _STREAMED_TOKENS and (tokens * top_k <= _MOST_ROWS or not torch.cuda.is_current_stream_capturing())
    if many and isinstance(gate_up, BlockScaledWeight) and isinstance(down, BlockScaledWeight):
        _many_rows(x, weights, ids, gate_up, down, first_expert, load, out)
        return out
    step = max(1, MAX_PAIRS // top_k)
    for i in range(0, tokens, step):
        rows = slice(i, min(i + step, tokens))
        part = x[rows] if isinstance(x, torch.Tensor) else x.quantized_rows(rows)
        _one_pass(part, weights[rows], ids[rows], gate_up, down, first_expert, load, out[rows])
    return out


def gated_mlp(x: Rows, gate_up: Weight, down: Weight) -> torch.Tensor:
    """See ops.gated_mlp. Rows for a block-scaled down product are quantized in the activation's own kernel."""
    both = gemm.linear(x, gate_up)
    if isinstance(gate_up, BlockScaledWeight) and isinstance(down, BlockScaledWeight) and both.dtype is torch.bfloat16:
        return gemm.linear_quantized(gemm.silu_and_mul_quantized(both), down, both.dtype)
    return gemm.linear(silu_and_mul(both), down)


def _one_pass(
    x: Rows,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    first_expert: int,
    load: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    device = ids.device
    tokens, top_k = ids.shape
    pairs = tokens * top_k
    gate_up_data, gate_up_scale = _parts(gate_up)
    down_data, down_scale = _parts(down)
    experts, width, hidden = gate_up_data.shape
    inner = width // 2
    token_tile = _expert_tile(tokens)
    capacity = pairs + (_ROW_ALIGNMENT - 1) * min(experts, pairs)

    groups = torch.empty(2, experts + 1, dtype=torch.int32, device=device)
    places = torch.empty(pairs, dtype=torch.int32, device=device)
    row_experts = torch.empty(capacity, dtype=torch.int32, device=device)
    sort = _Pairs(
        ids.data_ptr(),
        groups.data_ptr(),
        places.data_ptr(),
        row_experts.data_ptr(),
        pairs,
        first_expert,
        experts,
        token_tile,
        top_k,
        ids.stride(0),
        binding.pointer(load),
        _ROW_ALIGNMENT,
    )
    _launch("moe_sort", "sort_pairs", device, 1, _SORT_THREADS, sort, overlap=True)

    rows, rows_scale, to, copy = _empty_rows(capacity, hidden, device, quantized=gate_up_scale is not None)
    _scatter(x, places, top_k, to, copy)
    both = torch.empty(capacity, width, dtype=torch.bfloat16, device=device)
    product = gemm.stream(rows, rows_scale, gate_up_data, gate_up_scale, both, token_tile=token_tile, groups=groups)

    gated, gated_scale, to, copy = _empty_rows(capacity, inner, device, quantized=down_scale is not None)
    gate = _GateArgs(product.args, groups.data_ptr(), row_experts.data_ptr(), to, copy, experts)
    at_once = min(capacity, _GATED_ROWS * binding.sm_count(device.index))
    _launch("moe", f"gate_{_kind(down_scale)}", device, gemm.block_grid(at_once, inner), _THREADS, gate, overlap=True)
    each = torch.empty(capacity, hidden, dtype=torch.bfloat16, device=device)
    product = gemm.stream(gated, gated_scale, down_data, down_scale, each, token_tile=token_tile, groups=groups)

    combine = _CombineArgs(
        product.args,
        groups.data_ptr(),
        ids.data_ptr(),
        places.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
        first_expert,
        experts,
        top_k,
        ids.stride(0),
        weights.stride(0),
    )
    grid = tokens * -(-hidden // _COMBINED_COLUMNS)
    _launch("moe", "combine_experts", device, grid, _COMBINE_THREADS, combine, overlap=True)


def _scatter(x: Rows, places: torch.Tensor, top_k: int, to: gemm.QuantizedArgs, copy: int | None) -> None:
    """Rows of `x` to the places of their pairs: quantized in `to`, or as they are at `copy`."""
    scatter: ctypes.Structure
    if isinstance(x, torch.Tensor):
        name = f"scatter_{'fp8' if copy is None else 'bf16'}"
        scatter = _ScatterArgs(x.data_ptr(), places.data_ptr(), to, copy, top_k)
    else:
        codes, scales = x.quantized.data, x.quantized.scale
        name = "scatter_codes"
        scatter = _ScatterCodesArgs(
            codes.data_ptr(), scales.data_ptr(), places.data_ptr(), to,
            codes.stride(0), scales.stride(0), scales.stride(1), top_k,
        )  # fmt: skip
    grid = gemm.block_grid(places.shape[0] // top_k, to.width)
    if name == "scatter_fp8" and grid > _MANY_CTAS:
        name, grid = "scatter_many_fp8", gemm.block_grid(places.shape[0] // top_k, -(-to.width // _GROUPS_A_CTA))
    _launch("moe", name, places.device, grid, _THREADS, scatter, overlap=True)


def _many_rows(
    x: Rows,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: BlockScaledWeight,
    down: BlockScaledWeight,
    first_expert: int,
    load: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Of as many tokens as prompts bring: `out` in passes of at most _MOST_ROWS local pairs.

    Where all pairs are more than that, the local ones of every part of the tokens are read back, a layer's one wait for the
    device, since room for all pairs of all ranks' tokens would be world_size times what is needed.
    """
    device, (tokens, top_k), experts = ids.device, ids.shape, gate_up.data.shape[0]
    part = -(-tokens // _PARTS)  # tokens
    parts = -(-tokens // part)
    places = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
    groups = torch.empty(2, experts + 1, dtype=torch.int32, device=device)
    counts, totals = (torch.empty(n, dtype=torch.int32, device=device) for n in (parts * experts, parts))
    pairs = _Pairs(
        ids.data_ptr(), groups.data_ptr(), places.data_ptr(), None, tokens * top_k, first_expert, experts, _TILE_ROWS,
        top_k, ids.stride(0), binding.pointer(load), _BLOCK_ROWS,
    )  # fmt: skip
    args = _PartsArgs(pairs, counts.data_ptr(), totals.data_ptr(), part * top_k)
    _launch("moe_sort", "count_parts", device, parts, _SORT_THREADS, args, overlap=True)
    one_pass = [(0, parts, tokens * top_k)]
    for first, end, most in one_pass if tokens * top_k <= _MOST_ROWS else passes(totals.tolist(), _MOST_ROWS):
        at, to = first * part, min(end * part, tokens)
        mine = places[at * top_k : to * top_k]
        args.all.ids, args.all.places, args.all.pairs = ids[at:].data_ptr(), mine.data_ptr(), mine.numel()
        args.counts = counts[first * experts :].data_ptr()
        _launch("moe_sort", "place_parts", device, end - first, _SORT_THREADS, args, overlap=True)
        rows = x[at:to] if isinstance(x, torch.Tensor) else x.quantized_rows(slice(at, to))
        capacity = most + (_BLOCK_ROWS - 1) * min(experts, most)
        each = _experts_of_rows(rows, mine, top_k, capacity, gate_up, down, groups)
        total = _SumArgs(
            each.data_ptr(),
            mine.data_ptr(),
            weights[at:].data_ptr(),
            out[at:].data_ptr(),
            out.shape[1],
            top_k,
            weights.stride(0),
        )
        _launch("moe", "sum_experts", device, to - at, _THREADS, total, overlap=True)


def passes(totals: list[int], most: int) -> list[tuple[int, int, int]]:
    """(first part, end, local pairs) of each pass: as many parts as stay within `most` pairs; one part always does."""
    found, first, pairs = [], 0, 0
    for part, total in enumerate(totals):
        if pairs and pairs + total > most:
            found.append((first, part, pairs))
            first, pairs = part, 0
        pairs += total
    return [*found, (first, len(totals), pairs)]


def _experts_of_rows(
    x: Rows,
    places: torch.Tensor,
    top_k: int,
    capacity: int,
    gate_up: BlockScaledWeight,
    down: BlockScaledWeight,
    groups: torch.Tensor,
) -> torch.Tensor:
    """What its expert makes of every sorted row, [capacity, hidden]; rows that are nobody's hold anything."""
    device, (_, width, hidden) = places.device, gate_up.data.shape
    capacity = max(_TILE_ROWS, -(-capacity // _BLOCK_ROWS) * _BLOCK_ROWS)
    # One room: the last product takes the place of the first one's input and output.
    room = torch.empty(capacity * max(2 * width + hidden, 2 * hidden), dtype=torch.uint8, device=device)
    both, codes = room[: capacity * (2 * width + hidden)].split([2 * capacity * width, capacity * hidden])
    scale = torch.empty(-(-hidden // WEIGHT_BLOCK), capacity, device=device)
    rows = QuantizedActivation(codes.view(FP8).view(capacity, hidden), scale.t())
    _scatter(x, places, top_k, gemm.quantized_args(rows), None)
    gated = gemm.silu_and_mul_quantized(_grouped_product(rows, gate_up, groups, both), groups[0, -1:])
    return _grouped_product(gated, down, groups, room[: 2 * capacity * hidden])


def _grouped_product(
    x: QuantizedActivation, weight: BlockScaledWeight, groups: torch.Tensor, room: torch.Tensor
) -> torch.Tensor:
    """x [rows, K] @ weight [E, N, K]^T by the experts of `groups`, BF16 [rows, N] in the bytes of `room`."""
    rows, k = x.data.shape
    experts, n, _ = weight.data.shape
    out = room.view(torch.bfloat16).view(rows, n)
    args = _GroupedArgs()
    args.w = gemm._map(weight.data, (k, n, experts), (k, n * k), (WEIGHT_BLOCK, 128, 1))
    args.x = gemm._map(x.data, (k, rows), (k,), (WEIGHT_BLOCK, _BLOCK_ROWS))
    args.x_scale = gemm._scale_map(x.scale, (_TILE_ROWS, 1))
    args.out = gemm._map(out, (n, rows), (n,), (64, _BLOCK_ROWS))
    args.w_scale, args.groups, args.experts = weight.scale.data_ptr(), groups.data_ptr(), experts
    args.row_pairs, args.k_blocks, args.scale_rows = -(-n // 256), -(-k // WEIGHT_BLOCK), weight.scale.shape[1]
    with torch.cuda.device(x.data.device):
        kernel = binding.kernel("moe_grouped", "grouped_fp8", x.data.device.index)
        kernel.launch(binding.sm_count(x.data.device.index) // 2 * 2, 384, args, cluster=2, overlap=True)
    return out


def _expert_tile(tokens: int) -> int:
    """Tokens of an expert that share one read of its weights: enough for nearly all experts where each gets 1 in 27 or less
    of the tokens (DeepSeek-V2 and later), without fetching and multiplying rows that are not there. An expert with more
    takes several tiles, whose later reads come from the L2 cache."""
    for tile, most in ((8, 32), (16, 192), (32, 512), (64, 1024)):
        if tokens <= most:
            return tile
    return gemm.TOKEN_TILES[-1]


def _empty_rows(
    count: int, width: int, device: torch.device, *, quantized: bool
) -> tuple[torch.Tensor, torch.Tensor | None, gemm.QuantizedArgs, int | None]:
    """Room for sorted rows: (data, scale, and where the kernel that fills them finds either form)."""
    if quantized:
        q: QuantizedActivation = gemm.empty_activation(count, width, device)
        return q.data, q.scale, gemm.quantized_args(q), None
    rows = torch.empty(count, width, dtype=torch.bfloat16, device=device)
    return rows, None, gemm.QuantizedArgs(None, None, width, 0), rows.data_ptr()


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.data, weight.scale) if isinstance(weight, BlockScaledWeight) else (weight, None)


def _kind(scale: torch.Tensor | None) -> str:
    return "bf16" if scale is None else "fp8"


def _grouped_mlp_fp32(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: Weight, down: Weight, first_expert: int
) -> torch.Tensor:
    """FP32 activations exist for equality tests on small models: every expert computes every token, weight 0 for most."""
    out = torch.zeros_like(x)
    for e in range(_parts(gate_up)[0].shape[0]):
        up_e, down_e = (
            BlockScaledWeight(w.data[e], w.scale[e]) if isinstance(w, BlockScaledWeight) else w[e] for w in (gate_up, down)
        )
        gate, up = gemm.linear(x, up_e).chunk(2, dim=-1)
        share = torch.where(ids == first_expert + e, weights, 0.0).sum(dim=-1, keepdim=True)
        y = gemm.linear((F.silu(gate) * up), down_e)
        out += torch.where(share != 0, share * y, 0.0)
    return out


def _launch(
    module: str, name: str, device: torch.device, grid: int, threads: int, args: ctypes.Structure, *, overlap: bool = False
) -> None:
    with torch.cuda.device(device):
        binding.kernel(module, name, device.index).launch(grid, threads, args, overlap=overlap)
