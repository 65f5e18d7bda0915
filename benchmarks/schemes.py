"""Ways to quantize MLA decode attention, simulated on an exact cache: the paper's, its alternatives (Table 3), and single steps.

Simulated means: the FP32 values of cache and query are rounded as the scheme would store them and attention runs in FP32 on
the rounded values, P included. `snapmla` gives what `kernels.reference.mla_decode` gives on an FP8 cache (a test says so);
the product itself contains none of the alternatives.

Rows of one E4M3 scale ("granularity" of the content): per token; per tensor with a scale from other text (static) or of the
sequence at hand (dynamic); per block of 64 tokens; per channel; per tile of 128 tokens x 128 channels. The last four of these
look at tokens together, so a real cache would have to keep a tail of them unquantized; the simulation just sees them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels import ops
from kernels.layout import AMAX_FLOOR, BLOCK_SIZE, FP8, FP8_MAX, DecodePlan, LatentCache, LatentQuery
from kernels.reference.mla_decode import visible_lengths

_LOWEST = -1e30


@dataclass(frozen=True)
class Scheme:
    """content: granularity of its E4M3 scales, or "exact" or "bf16"
    rope: "exact", "bf16", "e4m3" (a scale of its own per token) or "joint" (the token's 576 values share one scale)
    query: whether queries are rounded like that too, content per token and head
    p_block: tokens of a block of P's quantization (Eq. 12), 0 to keep P
    """

    name: str
    label: str
    content: str
    rope: str
    query: bool
    p_block: int


EXACT = Scheme("exact", "exact (FP32)", "exact", "exact", False, 0)
BF16 = Scheme("bf16", "BF16", "bf16", "bf16", True, 0)
SNAPMLA = Scheme("snapmla", "SnapMLA: per token, RoPE BF16", "token", "bf16", True, BLOCK_SIZE)
ALTERNATIVES = (
    Scheme("a", "A: per token, RoPE in the same row", "token", "joint", True, BLOCK_SIZE),
    Scheme("a_own", "A': per token, RoPE with its own scale", "token", "e4m3", True, BLOCK_SIZE),
    Scheme("b", "B: per tensor, static", "static", "bf16", True, BLOCK_SIZE),
    Scheme("c", "C: per tensor, dynamic", "tensor", "bf16", True, BLOCK_SIZE),
    Scheme("d", "D: per block of 64 tokens", "block", "bf16", True, BLOCK_SIZE),
    Scheme("channel", "per channel", "channel", "bf16", True, BLOCK_SIZE),
    Scheme("tile", "128 x 128 tiles", "tile", "bf16", True, BLOCK_SIZE),
)
COMPARED = (BF16, SNAPMLA, *ALTERNATIVES)
STEPS = (
    Scheme("k_content", "K: latent to E4M3", "token", "exact", False, 0),
    Scheme("k_rope", "K: RoPE to BF16", "exact", "bf16", False, 0),
    Scheme("query", "Q: E4M3 and BF16 RoPE", "exact", "exact", True, 0),
    Scheme("p", "P to E4M3, blocks of 64", "exact", "exact", False, BLOCK_SIZE),
    Scheme("p128", "P to E4M3, blocks of 128", "exact", "exact", False, 2 * BLOCK_SIZE),
)


@dataclass(frozen=True)
class Keys:
    """Keys of one sequence as attention sees them. content [L, C], rope [L, R], FP32 values.

    scale: FP32 [L] the tokens' own scales, which are folded into P (3.2.2); None where scales belong to blocks or channels
    """

    content: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor | None


def round_e4m3(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x rounded to E4M3 codes times scale = max(amax, floor) / 448, and the scale; amax broadcasts against x."""
    scale = amax.clamp_min(AMAX_FLOOR) / FP8_MAX
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale, scale


def _bf16(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """x as BF16 in the domain of `scale` (Eq. 6), back in its own domain."""
    return (x / scale).bfloat16().float() * scale


def _content_amax(content: torch.Tensor, granularity: str, static_amax: float) -> torch.Tensor:
    """The maximum that sets each value's scale, broadcastable to content [L, C]."""
    size = content.abs()
    if granularity == "static":
        return torch.tensor(static_amax, device=content.device)
    if granularity == "tensor":
        return size.amax()
    if granularity == "token":
        return size.amax(1, keepdim=True)
    if granularity == "channel":
        return size.amax(0, keepdim=True)
    tokens, channels = {"block": (BLOCK_SIZE, content.shape[1]), "tile": (128, 128)}[granularity]
    padded = torch.nn.functional.pad(size, (0, -content.shape[1] % channels, 0, -len(content) % tokens))
    tiles = padded.unflatten(0, (-1, tokens)).unflatten(2, (-1, channels)).amax((1, 3))
    spread = tiles.repeat_interleave(tokens, 0).repeat_interleave(channels, 1)
    return spread[: content.shape[0], : content.shape[1]]


def stored_keys(scheme: Scheme, content: torch.Tensor, rope: torch.Tensor, static_amax: float = 0.0) -> Keys:
    """What a cache of this scheme gives back for exact latents [L, C] and rotated keys [L, R].

    static_amax: largest latent of the calibration text, for per-tensor static scales
    """
    if scheme.rope == "joint":
        both, scale = round_e4m3(torch.cat((content, rope), 1), torch.cat((content, rope), 1).abs().amax(1, keepdim=True))
        return Keys(*both.split((content.shape[1], rope.shape[1]), 1), scale[:, 0])
    scale: torch.Tensor | float = 1.0
    token_scale = None
    if scheme.content == "bf16":
        content = _bf16(content)
    elif scheme.content != "exact":
        content, scale = round_e4m3(content, _content_amax(content, scheme.content, static_amax))
        token_scale = scale[:, 0] if scheme.content == "token" else None
    if scheme.rope == "bf16":
        rope = _bf16(rope, scale if token_scale is not None else 1.0)
    elif scheme.rope == "e4m3":
        rope = round_e4m3(rope, rope.abs().amax(1, keepdim=True))[0]
    return Keys(content, rope, token_scale)


def stored_query(scheme: Scheme, content: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [..., H, C] and [..., H, R] as the scheme rounds them. Without key rounding (`query` alone) as SnapMLA does."""
    if not scheme.query:
        return content, rope
    if scheme.content == "bf16":
        return _bf16(content), _bf16(rope)
    if scheme.rope == "joint":
        both = torch.cat((content, rope), -1)
        return round_e4m3(both, both.abs().amax(-1, keepdim=True))[0].split((content.shape[-1], rope.shape[-1]), -1)
    rounded, scale = round_e4m3(content, content.abs().amax(-1, keepdim=True))
    if scheme.rope == "e4m3":
        return rounded, round_e4m3(rope, rope.abs().amax(-1, keepdim=True))[0]
    return rounded, _bf16(rope, scale)


def logits(query: tuple[torch.Tensor, torch.Tensor], keys: Keys, visible: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Attention logits [n, H, L] of rows [n, H, ...]; -inf from each row's visible [n] tokens on."""
    n, h, _ = query[0].shape
    scores = query[0].flatten(0, 1) @ keys.content.T
    scores.addmm_(query[1].flatten(0, 1), keys.rope.T).mul_(softmax_scale)
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible.unsqueeze(1)
    return scores.view(n, h, -1).masked_fill_(hidden.unsqueeze(1), float("-inf"))


def quantized_p(scores: torch.Tensor, keys: Keys, p_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """P [n, H, L] on the row's own scale as Eq. 12 and 13 make it of the logits, its values folded back, and its sum [n, H, 1].

    P is scaled by V's token scale first where there is one, then rounded with the block's largest value at 448.
    """
    length = scores.shape[-1]
    log_scale = torch.zeros(length, device=scores.device) if keys.scale is None else keys.scale.log()
    y = torch.nn.functional.pad(scores + log_scale, (0, -length % p_block), value=float("-inf")).unflatten(-1, (-1, p_block))
    block_top = y.amax(-1, keepdim=True).clamp_min(_LOWEST)
    weight = (block_top - block_top.amax(-2, keepdim=True)).exp()
    p = (y - block_top).exp_()
    rounded = ((p * FP8_MAX).to(FP8).float() * (weight / FP8_MAX)).flatten(-2)[..., :length] * (-log_scale).exp()
    total = ((p * weight).flatten(-2)[..., :length] * (-log_scale).exp()).sum(-1, keepdim=True)
    return rounded, total


def attend(
    scheme: Scheme, query: tuple[torch.Tensor, torch.Tensor], keys: Keys, visible: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Attention output [n, H, C] in latent space; query and keys are stored_query's and stored_keys'."""
    scores = logits(query, keys, visible, softmax_scale)
    if scheme.p_block:
        p, total = quantized_p(scores, keys, scheme.p_block)
        return (p.flatten(0, 1) @ keys.content).view(*scores.shape[:2], -1) / total
    return (scores.softmax(-1).flatten(0, 1) @ keys.content).view(*scores.shape[:2], -1)


# ---- in place of the engine's decode attention


Decode = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@contextlib.contextmanager
def decode_attention(replacement: Decode) -> Iterator[None]:
    """Run `replacement` wherever a model calls ops.mla_decode, inside a `with` block."""
    before = ops.mla_decode
    ops.mla_decode = replacement
    try:
        yield
    finally:
        ops.mla_decode = before


def decode_with(scheme: Scheme, static_amax: dict[int, float] | None = None) -> Decode:
    """A stand-in for ops.mla_decode that reads an exact cache through a scheme.

    static_amax: largest latent by the cache's data pointer of its content, needed by the static scheme
    """

    def decode(
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
        assert cache.scale is None, "schemes are simulated on an exact cache"
        b, s, h, c = query.content.shape
        visible = visible_lengths(seq_lens, num_query, s, causal)
        out = torch.zeros(b, s, h, c, dtype=out_dtype, device=query.content.device)
        amax = (static_amax or {}).get(cache.content.data_ptr(), 0.0)
        for rows in _rows_of_one_table(block_table):
            length = int(seq_lens[rows].max())
            if length == 0:
                continue
            longest = rows[int(seq_lens[rows].argmax())]
            ids = block_table[longest, : -(-length // BLOCK_SIZE)].long()
            keys = stored_keys(
                scheme, cache.content[ids].float().flatten(0, 1)[:length], cache.rope[ids].float().flatten(0, 1)[:length], amax
            )
            asked = stored_query(scheme, query.content[rows].flatten(0, 1).float(), query.rope[rows].flatten(0, 1).float())
            part = attend(scheme, asked, keys, visible[rows].flatten(), softmax_scale)
            out[rows] = torch.nan_to_num(part).view(len(rows), s, h, c).to(out_dtype)  # a row that sees nothing gives zeros
        return out, torch.full((b, s, h), float("nan"), device=out.device)  # nobody reads the lse of a decode row

    return decode


def _rows_of_one_table(block_table: torch.Tensor) -> list[list[int]]:
    """Batch rows grouped by equal tables: such rows are one sequence read at several lengths."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, table in enumerate(block_table.tolist()):
        groups.setdefault(tuple(table), []).append(row)
    return list(groups.values())
