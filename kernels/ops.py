"""Every device operation: its contract, its argument checks, and the only choice between backends.

Two tables of plain functions with identical signatures stand behind this file: `kernels.reference` (torch on any
device, the oracle) and `kernels.cuda` (Hopper). A CPU tensor runs the reference; a CUDA tensor runs the CUDA table,
and the reference only inside `backend("reference")` or after `use_backend("reference")`. A missing CUDA operation is
an error, never a silent fallback.

Conventions: lse is the natural logarithm in the real domain, FP32. "§" and "Eq." are the SnapMLA paper's. All
sequence lengths and tables are int32. Contract violations raise KernelContractError before any launch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernels.errors import KernelContractError, KernelError
from kernels.layout import (
    Activation,
    BlockScaledWeight,
    CacheFormat,
    DecodeLines,
    DecodePlan,
    Drafts,
    ExactCopy,
    LatentCache,
    LatentQuery,
    QuantizedActivation,
    Routing,
    Rows,
    SamplingTable,
    Weight,
)

_forced_backend: str | None = None  # debug override, the one mutable global of this file
_BACKENDS = {"cpu": "kernels.reference", "cuda": "kernels.cuda", "reference": "kernels.reference"}


def use_backend(name: str | None) -> None:
    """Force one backend for the whole process ("reference"), or None to choose by device."""
    global _forced_backend
    if name not in (None, "reference", "cuda"):
        raise KernelContractError("use_backend", f"backend {name!r} is not one of 'reference', 'cuda', None")
    _forced_backend = name


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one backend inside a `with` block, for debugging and for tests."""
    before = _forced_backend
    use_backend(name)
    try:
        yield
    finally:
        use_backend(before)


@functools.cache
def _operations(key: str) -> dict[str, Callable[..., Any]]:
    """A backend's table, imported when it is first used: kernels.cuda is never loaded on a CPU."""
    return importlib.import_module(_BACKENDS[key]).OPS


def _call(name: str, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    key = _forced_backend or device.type
    if key not in _BACKENDS:
        raise KernelError(name, f"no backend for device type {device.type!r}; use a CPU or CUDA device")
    table = _operations(key)
    if name not in table:
        raise KernelError(
            name, f"the {key} backend has no such operation; run with the reference backend (--kernels reference)"
        )
    return table[name](*args, **kwargs)


def _require(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise KernelContractError(op, message)


def _require_int32(op: str, device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            _require(t.dtype == torch.int32, op, f"{name} must be int32, got {t.dtype}")
            _require(t.device == device, op, f"{name} is on {t.device}, expected {device}")


_FLOATS = (torch.float32, torch.bfloat16)


# ---- latent cache -----------------------------------------------------------------------------------------------


def quantize_q(
    q_content: torch.Tensor, q_rope: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, fmt: CacheFormat
) -> LatentQuery:
    """Rotate the RoPE part, quantize absorbed queries per token and head, move RoPE into that domain (§3.1.2, Eq. 6).

    q_content: BF16|FP32 [T, H, C]  W_UK-absorbed query, any strides over T and H
    q_rope:    BF16|FP32 [T, H, R]  query before rotation (interleaved pairs), any strides over T and H
    positions: int64 [T]            position of each row
    cos_sin:   FP32 [P, R]          cosines then sines of each position, see `rope`
    fmt:       format of the cache that will be read; the exact formats only rotate and cast
    Returns a LatentQuery with leading dimensions [T]; scale = max(amax, AMAX_FLOOR) / 448 for FP8.
    """
    op = "quantize_q"
    _require(q_content.ndim == 3 and q_rope.ndim == 3, op, "q_content and q_rope must be [T, H, C] and [T, H, R]")
    _require(q_content.shape[:2] == q_rope.shape[:2], op, f"rows and heads differ: {q_content.shape} and {q_rope.shape}")
    _require(q_content.dtype in _FLOATS and q_rope.dtype in _FLOATS, op, "q_content and q_rope must be BF16 or FP32")
    _require(q_content.stride(-1) == 1 and q_rope.stride(-1) == 1, op, "the last dimension must be dense")
    _require_rope_table(op, q_rope, positions, cos_sin)
    return _call(op, q_content.device, q_content, q_rope, positions, cos_sin, fmt=fmt)


def absorb_query(
    q: torch.Tensor, w_uk: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, fmt: CacheFormat
) -> LatentQuery:
    """`quantize_q` of the product of q's first part with W_UK (rounded to q's dtype) and of q's second part.

    q:    BF16|FP32 [T, H, nope + R], before rotation
    w_uk: [H, nope, C], its last dimension dense
    """
    op = "absorb_query"
    _require(
        q.ndim == w_uk.ndim == 3 and q.shape[1] == w_uk.shape[0], op, f"q {tuple(q.shape)} does not fit {tuple(w_uk.shape)}"
    )
    _require(q.dtype in _FLOATS and q.stride(-1) == 1, op, "q must be BF16 or FP32, its last dimension dense")
    _require_rope_table(op, q[..., w_uk.shape[1] :], positions, cos_sin)
    return _call(op, q.device, q, w_uk, positions, cos_sin, fmt=fmt)


def project_values(out: torch.Tensor, w_uv: torch.Tensor, *, quantize: bool) -> Rows:
    """Attention's output out of latent space, head by head: [T, H, C] times W_UV [H, C, v] -> rows [T, H * v] of out's dtype.

    quantize: the rows come quantized for a block-scaled product, and only so
    """
    op = "project_values"
    _require(
        out.ndim == w_uv.ndim == 3 and out.shape[1:] == w_uv.shape[:2],
        op,
        f"out {tuple(out.shape)} does not fit {tuple(w_uv.shape)}",
    )
    return _call(op, out.device, out, w_uv, quantize=quantize)


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
    """Normalize the latent, rotate the shared key, quantize and write both into paged slots, in one pass (§3.3.1).

    latent:      BF16|FP32 [T, C]  output of kv_a_proj before its RMSNorm, any row stride
    k_rope:      BF16|FP32 [T, R]  shared key before rotation, any row stride
    norm_weight: BF16|FP32 [C]     RMSNorm weight, LongCat's latent factor folded in
    slots:       int64 [T]         block * 64 + offset; -1 writes nothing
    keep:        the last `keep` rows are also returned unquantized for prefill (normalized latent, rotated key)
    copy:        rows with a slot are also written there unquantized, where their sequence has a copy that reaches so far
    Returns ([keep, C], [keep, R]) in the input's dtype.
    """
    op = "append_kv"
    rows = latent.shape[0]
    _require(
        latent.ndim == 2 and latent.shape[1] == cache.latent_dim,
        op,
        f"latent must be [T, {cache.latent_dim}], got {tuple(latent.shape)}",
    )
    _require(
        k_rope.shape == (rows, cache.rope_dim), op, f"k_rope must be [{rows}, {cache.rope_dim}], got {tuple(k_rope.shape)}"
    )
    _require(latent.dtype in _FLOATS and k_rope.dtype in _FLOATS, op, "latent and k_rope must be BF16 or FP32")
    _require(latent.stride(-1) == 1 and k_rope.stride(-1) == 1, op, "the last dimension must be dense")
    _require(norm_weight.shape == (cache.latent_dim,), op, f"norm_weight must be [{cache.latent_dim}]")
    _require(slots.dtype == torch.int64 and slots.shape == (rows,), op, f"slots must be int64 [{rows}]")
    _require(0 <= keep <= rows, op, f"keep must lie in 0..{rows}, got {keep}")
    _require_rope_table(op, k_rope, positions, cos_sin)
    if copy is not None:
        widths = copy.cache.latent_dim, copy.cache.rope_dim
        _require(copy.cache.scale is None, op, "copy must lie in an exact cache")
        _require(widths == (cache.latent_dim, cache.rope_dim), op, f"copy has other widths than the cache: {widths}")
        dense = copy.cache.content.is_contiguous() and copy.cache.rope.is_contiguous()
        _require(dense, op, "copy must be dense, so that a sequence lies in it whole")
        _require(copy.starts.dtype == torch.int64 and copy.starts.shape == (rows,), op, f"copy.starts must be int64 [{rows}]")
    return _call(
        op, latent.device, cache, latent, k_rope, norm_weight, positions, cos_sin, slots, eps=eps, keep=keep, copy=copy
    )


def fetch_dequant(
    cache: LatentCache,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    cu_lens: torch.Tensor,
    *,
    total: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather cached tokens by block table and restore their real values (§3.3.1, Fused-Fetch-Dequant).

    block_table: int32 [P, max_blocks]  blocks of each sequence; entries past a length may hold anything
    starts:      int32 [P]              first token to fetch of each sequence
    cu_lens:     int32 [P + 1]          cumulative token counts; cu_lens[-1] == total
    Returns (latent [total, C], rotated key [total, R]), packed, in `dtype`.
    """
    op = "fetch_dequant"
    _require_int32(op, cache.content.device, block_table=block_table, starts=starts, cu_lens=cu_lens)
    _require(block_table.ndim == 2, op, "block_table must be [P, max_blocks]")
    _require(starts.shape == (block_table.shape[0],), op, "starts must be [P]")
    _require(cu_lens.shape == (block_table.shape[0] + 1,), op, "cu_lens must be [P + 1]")
    _require(dtype in _FLOATS, op, f"dtype must be BF16 or FP32, got {dtype}")
    return _call(op, cache.content.device, cache, block_table, starts, cu_lens, total=total, dtype=dtype)


# ---- attention --------------------------------------------------------------------------------------------------


def plan_decode(
    seq_lens: torch.Tensor, *, query_len: int, num_heads: int, fmt: CacheFormat, batch_invariant: bool = False
) -> DecodePlan:
    """Plan the split of every sequence's keys over the device, from lengths that stay on the device.

    seq_lens: int32 [B]; once per step, shared by all layers; safe inside CUDA-graph capture.
    batch_invariant: fixed split size and combine order, so that a row's bits do not depend on its batch.
    """
    op = "plan_decode"
    _require_int32(op, seq_lens.device, seq_lens=seq_lens)
    _require(1 <= query_len <= 4, op, f"query_len must lie in 1..4, got {query_len}")
    _require(1 <= num_heads <= 128, op, f"num_heads must lie in 1..128, got {num_heads}")
    return _call(
        op, seq_lens.device, seq_lens, query_len=query_len, num_heads=num_heads, fmt=fmt, batch_invariant=batch_invariant
    )


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
    """Absorbed MLA attention of S query rows per sequence against the paged latent cache (Eq. 5; Algorithm 1, Eq. 12, 13).

    query:       LatentQuery [B, S, H, ...] in the cache's domain
    block_table: int32 [B, max_blocks]; entries past a sequence's length may hold anything
    seq_lens:    int32 [B]  tokens in the cache, this step's own included; 0 for a padded row
    num_query:   int32 [B] or None  live query rows (the first ones); None means all S
    causal:      row i of n live rows sees seq_len - (n - 1 - i) tokens; without it every row sees seq_len
    Returns (out `out_dtype` [B, S, H, C], still in latent space, and lse FP32 [B, S, H]). Rows without a visible
    token, and rows past num_query, give zeros and -inf.
    """
    op = "mla_decode"
    _require(query.content.ndim == 4, op, f"query must be [B, S, H, C], got {tuple(query.content.shape)}")
    b, s, h, c = query.content.shape
    device = query.content.device
    _require(1 <= s <= 4, op, f"1 to 4 query rows per sequence, got {s}")
    _require(1 <= h <= 128, op, f"1 to 128 heads, got {h}")
    _require(c == cache.latent_dim, op, f"query latent width {c} differs from the cache's {cache.latent_dim}")
    _require(
        query.rope.shape == (b, s, h, cache.rope_dim),
        op,
        f"query.rope must be {(b, s, h, cache.rope_dim)}, got {tuple(query.rope.shape)}",
    )
    _require(query.content.dtype == cache.content.dtype, op, f"query is {query.content.dtype}, cache is {cache.content.dtype}")
    _require((query.scale is None) == (cache.scale is None), op, "query and cache must both carry scales, or neither")
    _require_int32(op, device, block_table=block_table, seq_lens=seq_lens, num_query=num_query)
    _require(block_table.ndim == 2 and block_table.shape[0] == b, op, f"block_table must be [{b}, max_blocks]")
    _require(seq_lens.shape == (b,), op, f"seq_lens must be [{b}]")
    _require(num_query is None or num_query.shape == (b,), op, f"num_query must be [{b}]")
    _require(out_dtype in _FLOATS, op, f"out_dtype must be BF16 or FP32, got {out_dtype}")
    return _call(
        op, device, query, cache, block_table, seq_lens, num_query,
        softmax_scale=softmax_scale, causal=causal, plan=plan, out_dtype=out_dtype,
    )  # fmt: skip


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_lens_q: torch.Tensor,
    cu_lens_k: torch.Tensor,
    *,
    max_len_q: int,
    max_len_k: int,
    softmax_scale: float,
    causal: bool,
    lens_q: list[int] | None = None,
    lens_k: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expanded attention of packed sequences (Eq. 1 to 4), with lse for merging.

    q: [Tq, H, Dqk], k: [Tk, H, Dqk], v: [Tk, H, Dv], all of one dtype, BF16 or FP32
    cu_lens_q, cu_lens_k: int32 [P + 1] cumulative lengths
    causal: query i of a sequence sees its first len_k - len_q + i + 1 keys; otherwise all
    lens_q, lens_k: the lengths on the host too; where they are None, a GPU waits to read them back
    Returns (out [Tq, H, Dv], lse FP32 [Tq, H]); a row without a visible key gives zeros and -inf.
    """
    op = "prefill_attention"
    _require(q.ndim == k.ndim == v.ndim == 3, op, "q, k, v must be [T, H, D]")
    _require(
        q.shape[1:] == k.shape[1:] and k.shape[:2] == v.shape[:2],
        op,
        f"shapes disagree: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
    )
    _require(q.dtype == k.dtype == v.dtype and q.dtype in _FLOATS, op, "q, k, v must share BF16 or FP32")
    _require_int32(op, q.device, cu_lens_q=cu_lens_q, cu_lens_k=cu_lens_k)
    _require(cu_lens_q.shape == cu_lens_k.shape, op, "cu_lens_q and cu_lens_k must have one length")
    for name, lens, rows in (("lens_q", lens_q, q.shape[0]), ("lens_k", lens_k, k.shape[0])):
        right = lens is None or (len(lens) + 1 == cu_lens_q.shape[0] and sum(lens) == rows)
        _require(right, op, f"{name} must be the lengths of {cu_lens_q.shape[0] - 1} sequences of {rows} tokens in all")
    return _call(
        op, q.device, q, k, v, cu_lens_q, cu_lens_k,
        max_len_q=max_len_q, max_len_k=max_len_k, softmax_scale=softmax_scale, causal=causal, lens_q=lens_q, lens_k=lens_k,
    )  # fmt: skip


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint key sets by their lse.

    out: [T, H, D], lse: FP32 [T, H]. An infinite lse of either sign means "no keys" and weighs 0; two empty parts give
    zeros and -inf.
    """
    op = "merge_attention"
    _require(
        out_a.shape == out_b.shape and out_a.ndim == 3,
        op,
        f"outputs must share [T, H, D], got {tuple(out_a.shape)} and {tuple(out_b.shape)}",
    )
    _require(
        lse_a.shape == lse_b.shape == out_a.shape[:2],
        op,
        f"lse must be {tuple(out_a.shape[:2])}, got {tuple(lse_a.shape)} and {tuple(lse_b.shape)}",
    )
    return _call(op, out_a.device, out_a, lse_a, out_b, lse_b)


# ---- dense layers -----------------------------------------------------------------------------------------------


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension, after adding `residual` if given.

    x: BF16|FP32 [..., D], any row stride; weight: BF16|FP32 [D]; the sum of squares and the product with the weight are
    FP32. Returns (normalized, x + residual), both in x's dtype.
    """
    _require(weight.shape == x.shape[-1:], "rms_norm", f"weight must be [{x.shape[-1]}], got {tuple(weight.shape)}")
    _require(residual is None or residual.shape == x.shape, "rms_norm", "residual must have x's shape")
    return _call("rms_norm", x.device, x, weight, eps=eps, residual=residual)


def rms_norm_quantized(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, keep_plain: bool
) -> tuple[Activation, torch.Tensor]:
    """`rms_norm` of [T, D] for block-scaled products: the normalized rows, rounded to x's dtype, also quantized as `linear`
    would.

    keep_plain: whether the rows before quantization are kept for other readers (a router, experts)
    Returns (normalized rows, x + residual).
    """
    op = "rms_norm_quantized"
    _require(
        x.ndim == 2 and weight.shape == x.shape[-1:], op, f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit"
    )
    _require(residual is None or residual.shape == x.shape, op, "residual must have x's shape")
    return _call(op, x.device, x, weight, eps=eps, residual=residual, keep_plain=keep_plain)


def quantize_activation(x: torch.Tensor) -> QuantizedActivation:
    """x BF16|FP32 [T, K] as `linear` quantizes it for a BlockScaledWeight: E4M3, one scale per token and 128 channels."""
    op = "quantize_activation"
    _require(x.ndim == 2 and x.dtype in _FLOATS, op, f"x must be BF16 or FP32 [T, K], got {x.dtype} {tuple(x.shape)}")
    return _call(op, x.device, x)


def rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool, in_place: bool = False
) -> torch.Tensor:
    """Rotary embedding of the last dimension.

    x: BF16|FP32 [T, R] or [T, H, R]; positions: int64 [T]; cos_sin: FP32 [P, R], R/2 cosines then R/2 sines.
    interleaved: pairs are (2i, 2i + 1) and the result keeps that order; otherwise (i, i + R/2).
    in_place: x itself holds the result and is returned
    """
    _require_rope_table("rope", x, positions, cos_sin)
    return _call("rope", x.device, x, positions, cos_sin, interleaved=interleaved, in_place=in_place)


def join_heads(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Keys of expanded attention (Eq. 2): every head's own dims, then those that all heads share.

    own: BF16|FP32 [T, H, N], shared: the same dtype [T, R]; returns a dense [T, H, N + R].
    """
    _require(
        own.ndim == 3 and shared.ndim == 2 and shared.shape[0] == own.shape[0] and shared.dtype == own.dtype,
        "join_heads",
        f"shared must be {own.dtype} [{own.shape[0]}, R], got {shared.dtype} {tuple(shared.shape)}",
    )
    return _call("join_heads", own.device, own, shared)


def _require_rope_table(op: str, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    _require(positions.dtype == torch.int64 and positions.shape == x.shape[:1], op, f"positions must be int64 [{x.shape[0]}]")
    _require(
        cos_sin.ndim == 2 and cos_sin.shape[1] == x.shape[-1],
        op,
        f"cos_sin must be [P, {x.shape[-1]}], got {tuple(cos_sin.shape)}",
    )
    _require(cos_sin.dtype == torch.float32, op, f"cos_sin must be FP32, got {cos_sin.dtype}")


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [..., 2 I] holding the two halves side by side; returns [..., I]."""
    _require(gate_up.shape[-1] % 2 == 0, "silu_and_mul", f"the last dimension must be even, got {gate_up.shape[-1]}")
    return _call("silu_and_mul", gate_up.device, gate_up)


def linear(x: Rows, weight: Weight) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T.

    A BlockScaledWeight quantizes x per token and 128 channels first (amax floor 1e-4, E4M3), as the published
    checkpoints' dynamic activation scheme prescribes, unless x comes quantized; products accumulate in FP32. Returns x's
    dtype.
    """
    rows = _shape_source(x)
    data = weight.data if isinstance(weight, BlockScaledWeight) else weight
    _require(data.ndim == 2, "linear", f"weight must be [N, K], got {tuple(data.shape)}")
    _require(rows.shape[-1] == data.shape[1], "linear", f"x has {rows.shape[-1]} columns, weight {data.shape[1]}")
    return _call("linear", rows.device, x, weight)


def gated_mlp(x: Rows, gate_up: Weight, down: Weight) -> torch.Tensor:
    """down(silu(gate x) * up x): linear, silu_and_mul and linear as one operation, with the same roundings.

    x: BF16|FP32 [T, D]; gate_up: [2 I, D], the two halves one above the other; down: [D, I]. Returns x's dtype [T, D].
    """
    op, rows = "gated_mlp", _shape_source(x)
    first, second = (w.data if isinstance(w, BlockScaledWeight) else w for w in (gate_up, down))
    _require(rows.ndim == 2, op, f"x must be [T, D], got {tuple(rows.shape)}")
    _require(
        first.ndim == second.ndim == 2
        and first.shape == (2 * second.shape[1], rows.shape[1])
        and second.shape[0] == rows.shape[1],
        op,
        f"gate_up must be [2 I, {rows.shape[1]}] and down [{rows.shape[1]}, I], got {tuple(first.shape)} and {tuple(second.shape)}",
    )
    return _call(op, rows.device, x, gate_up, down)


def _shape_source(x: Rows) -> torch.Tensor:
    return x.quantized.data if isinstance(x, Activation) else x


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x BF16|FP32 [T, D] @ weight BF16|FP32 [E, D]^T in FP32 [T, E]: a router must not round its scores to BF16."""
    op = "router_logits"
    _require(
        x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1],
        op,
        f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}",
    )
    _require(
        x.dtype in _FLOATS and weight.dtype in _FLOATS,
        op,
        f"x and weight must be BF16 or FP32, got {x.dtype} and {weight.dtype}",
    )
    return _call(op, x.device, x, weight)


# ---- experts ----------------------------------------------------------------------------------------------------


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
    """Choose experts and weigh them (DeepSeek-V2, V3 and LongCat-Flash differ in arguments only).

    logits: FP32 [T, E]; bias: FP32 [E] or None, selects but never weighs
    scoring: "sigmoid" (V3) or "softmax" (V2, LongCat)
    num_groups, top_groups: experts outside the best groups are dropped; a group's score is the sum of its two largest
        biased scores when a bias is given (V3), else its maximum (V2). num_groups 1 keeps all.
    normalize: divide the chosen scores by their sum + 1e-20; always multiplied by scaling_factor
    Returns (weights FP32 [T, top_k], ids int32 [T, top_k]). Rows are independent.
    """
    op = "route"
    _require(
        logits.ndim == 2 and logits.dtype == torch.float32,
        op,
        f"logits must be FP32 [T, E], got {logits.dtype} {tuple(logits.shape)}",
    )
    experts = logits.shape[1]
    _require(scoring in ("sigmoid", "softmax"), op, f"scoring must be 'sigmoid' or 'softmax', got {scoring!r}")
    _require(bias is None or bias.shape == (experts,), op, f"bias must be [{experts}]")
    _require(1 <= top_k <= experts, op, f"top_k must lie in 1..{experts}, got {top_k}")
    _require(
        num_groups >= 1 and experts % num_groups == 0 and 1 <= top_groups <= num_groups,
        op,
        f"{experts} experts cannot form {num_groups} groups keeping {top_groups}",
    )
    return _call(
        op, logits.device, logits, bias,
        scoring=scoring, top_k=top_k, num_groups=num_groups, top_groups=top_groups, normalize=normalize, scaling_factor=scaling_factor,
    )  # fmt: skip


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
    """`route` of `router_logits`, for rows that are live: the others get ids -1 and weights 0.

    x: BF16|FP32 [T, D]; router: BF16|FP32 [E, D]; live: bool [T], None when all are
    """
    op = "choose_experts"
    _require(
        x.ndim == router.ndim == 2 and x.shape[1] == router.shape[1],
        op,
        f"x {tuple(x.shape)} does not fit {tuple(router.shape)}",
    )
    _require(live is None or (live.dtype == torch.bool and live.shape == x.shape[:1]), op, f"live must be bool [{x.shape[0]}]")
    experts = router.shape[0]
    _require(1 <= top_k <= experts and experts % num_groups == 0, op, f"{top_k} of {experts} experts in {num_groups} groups")
    return _call(
        op, x.device, x, router, bias, live,
        scoring=scoring, top_k=top_k, num_groups=num_groups, top_groups=top_groups, normalize=normalize, scaling_factor=scaling_factor,
    )  # fmt: skip


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
    """Weighted sum over a token's local experts of down_e(silu(gate_e x) * up_e x).

    x: BF16|FP32 [T, D]; weights: FP32 [T, K]; ids: int32 [T, K] global expert ids, both of any row stride. Rows that come
        quantized, codes and scales of any row stride, give what the rows they were made from give.
    gate_up: [E_local, 2 I, D]; down: [E_local, D, I]; they hold experts first_expert .. first_expert + E_local - 1
    Ids outside that range (remote, zero-computation or masked experts, -1 included) contribute nothing and cost nothing.
    load: int64 [E_local] or None; the number of rows each expert gets is added to it
    Returns x's dtype [T, D]; the sum over experts is FP32.
    """
    op, rows = "grouped_mlp", _shape_source(x)
    experts = (gate_up.data if isinstance(gate_up, BlockScaledWeight) else gate_up).shape[0]
    _require(
        load is None or (load.dtype == torch.int64 and load.shape == (experts,) and load.is_contiguous()),
        op,
        f"load must be contiguous int64 [{experts}]",
    )
    _require(rows.ndim == 2, op, f"x must be [T, D], got {tuple(rows.shape)}")
    _require(
        isinstance(x, torch.Tensor) or isinstance(gate_up, BlockScaledWeight),
        op,
        "rows come quantized, the weights are not FP8",
    )
    _require(
        ids.dtype == torch.int32 and ids.shape == weights.shape and ids.shape[0] == rows.shape[0],
        op,
        "ids and weights must be [T, K], ids int32",
    )
    return _call(op, rows.device, x, weights, ids, gate_up, down, first_expert=first_expert, load=load)


# ---- sampling ---------------------------------------------------------------------------------------------------


def choose_tokens(
    logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, drafts: Drafts | None = None
) -> torch.Tensor:
    """One token a line, the best or a draw, as the line's row of the table wants it; order as in engine/sampling_params.py.

    logits: FP32 [n, V], of any row stride, not modified; positions: int64 [n] that the tokens will have; rows: int64 [n]
    drafts: what the first B * S lines verify; penalties of a line count the drafts before it
    A drawn line takes the best of scaled logits plus Gumbel noise, which is a function of (seed, position, token id) alone;
    of equal values the first counts. Under ratio acceptance a drawn line with a draft takes the draft with probability
    min(1, p / q), else a draw from max(0, p - q), by noise of other streams of the same seed.
    Returns int64 [n]; -1 where the best logit is not finite.
    """
    op = "choose_tokens"
    _require_lines(op, logits, positions, rows, table)
    if drafts is not None:
        _require_drafts(op, logits.shape[0], drafts)
    return _call(op, logits.device, logits, positions, rows, table, drafts)


def draft_tokens(
    logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable, probs: torch.Tensor | None = None
) -> torch.Tensor:
    """One draft a line: the best token of greedy rows, else a draw from softmax(logits / temperature), without filters.

    logits, positions, rows: as for choose_tokens, each row at most once but where it is greedy
    probs: FP32 [R, V], any row stride, None under exact acceptance; drawn rows leave their distribution there, and draw by a
        stream of noise of their own. Without it the noise is that of the token that choose_tokens gives for the position.
    Returns int64 [n]; 0 where the best logit is not finite.
    """
    op = "draft_tokens"
    _require_lines(op, logits, positions, rows, table)
    if probs is not None:
        fits = probs.dtype == torch.float32 and probs.shape == table.history.shape and probs.stride(1) == 1
        _require(fits, op, "probs must be FP32 [R, V], its rows dense")
    return _call(op, logits.device, logits, positions, rows, table, probs)


def _require_lines(op: str, logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: SamplingTable) -> None:
    n = logits.shape[0]
    _require(logits.ndim == 2 and logits.dtype == torch.float32, op, f"logits must be FP32 [n, vocab], got {logits.dtype}")
    _require(logits.stride(1) == 1, op, "logits must be dense in their last dimension")
    _require(logits.shape[1] == table.vocab_size, op, f"the table is for {table.vocab_size} tokens, got {logits.shape[1]}")
    _require_int64(op, n, positions=positions, rows=rows)


def _require_int64(op: str, count: int, **tensors: torch.Tensor) -> None:
    for name, t in tensors.items():
        _require(
            t.dtype == torch.int64 and t.shape == (count,) and t.is_contiguous(),
            op,
            f"{name} must be contiguous int64 [{count}], got {t.dtype} {tuple(t.shape)} of strides {t.stride()}",
        )


def _require_drafts(op: str, count: int, drafts: Drafts) -> None:
    tokens, (b, depth) = drafts.tokens, drafts.tokens.shape
    _require(tokens.dtype == torch.int64, op, f"drafts must be int64, got {tokens.dtype}")
    _require(tokens.stride(1) == 1, op, "a sequence's drafts must be adjacent")
    _require(b * (depth + 1) <= count, op, f"{b} x {depth + 1} verified lines, {count} in all")
    _require_int64(op, b, counts=drafts.counts)
    if (probs := drafts.probs) is not None:
        _require(
            probs.dtype == torch.float32 and probs.shape[1] >= depth and probs.stride(2) == 1, op, "probs: FP32 [R, depth, V]"
        )


# ---- decode sequences -------------------------------------------------------------------------------------------


def decode_lines(
    starts: torch.Tensor, num_drafts: torch.Tensor | None, num_slots: torch.Tensor, block_table: torch.Tensor, query_len: int
) -> DecodeLines:
    """Lines of sequences whose first positions only the device knows.

    starts: int64 [B]; num_drafts: int64 [B] planned, None: none; num_slots: int64 [B] slots of each sequence, 0 for a padded one
    block_table: int32 [B, blocks]
    A sequence that has ended without the planner knowing may start behind its slots or reach beyond them: lines there are not
    live, and their tokens are dropped.
    """
    op, count = "decode_lines", starts.shape[0]
    _require_int64(op, count, starts=starts, num_slots=num_slots)
    if num_drafts is not None:
        _require_int64(op, count, num_drafts=num_drafts)
    _require(
        block_table.shape[0] == count and block_table.stride(1) == 1,
        op,
        f"block_table must be [{count}, blocks], its rows dense",
    )
    _require_int32(op, starts.device, block_table=block_table)
    return _call(op, starts.device, starts, num_drafts, num_slots, block_table, query_len)


def accept_tokens(tokens: torch.Tensor, rows: torch.Tensor, table: SamplingTable, drafts: Drafts | None = None) -> torch.Tensor:
    """How many leading drafts of each sequence equal what was chosen in their place, int64 [B]; none without drafts.

    tokens, rows: int64 [n], as choose_tokens gave and took them
    Tokens that stay, those up to a sequence's first rejected draft, are counted in their rows' histories.
    """
    op = "accept_tokens"
    _require_int64(op, tokens.shape[0], tokens=tokens, rows=rows)
    if drafts is not None:
        _require_drafts(op, tokens.shape[0], drafts)
    return _call(op, tokens.device, tokens, rows, table, drafts)
