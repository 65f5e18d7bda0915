"""Types that operations exchange: the latent cache, the latent query, the block-scaled weight.

A format is a type here, so no other file compares format names. Shape letters (whole project): T tokens,
B sequences, S query rows per sequence, H local heads, C latent width (512), R RoPE width (64), N cache blocks,
D hidden, E experts, K experts per token.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

BLOCK_SIZE = 64  # tokens per cache block, equal to the key tile of the Hopper kernel
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Lower bound of a row's maximum before it becomes a scale. RoPE is divided by the scale, so the floor keeps products of
# two pre-scaled RoPE values of 1e3 (4.5e9 each) far below FP32's limit even beside an all-zero latent.
AMAX_FLOOR = 1e-4
FP8_LATENT_DIM, FP8_ROPE_DIM = 512, 64  # the only widths of the FP8 format; exact formats take any
WEIGHT_BLOCK = 128  # published FP8 weights carry one scale per 128 x 128 block


class CacheFormat(enum.Enum):
    """How a token's latent and RoPE parts are stored."""

    FP8 = "fp8"  # SnapMLA: E4M3 latent, one FP32 scale a token, BF16 RoPE divided by that scale (3.1, Eq. 6)
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def content_dtype(self) -> torch.dtype:
        return {CacheFormat.FP8: FP8, CacheFormat.BF16: torch.bfloat16, CacheFormat.FP32: torch.float32}[self]

    @property
    def rope_dtype(self) -> torch.dtype:
        return torch.float32 if self is CacheFormat.FP32 else torch.bfloat16

    def bytes_per_token(self, latent_dim: int, rope_dim: int) -> int:
        """Bytes one token takes in one attention layer: 644 for FP8 and 1,152 for BF16 at 512 + 64."""
        scale_bytes = 4 if self is CacheFormat.FP8 else 0
        return latent_dim * self.content_dtype.itemsize + rope_dim * self.rope_dtype.itemsize + scale_bytes


@dataclass(frozen=True)
class LatentCache:
    """Paged cache of one attention layer.

    content: E4M3 | BF16 | FP32 [N, 64, C]  normalized latent; real value = stored * scale
    rope:    BF16 | FP32        [N, 64, R]  rotated shared key; real value = stored * scale (pre-scaled domain, Eq. 6)
    scale:   FP32 [N, 64], or None for the exact formats (stored values are the real ones)
    Block strides are free (a pool may interleave layers); the last two dimensions are dense.
    """

    content: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor | None

    @staticmethod
    def allocate(fmt: CacheFormat, num_blocks: int, latent_dim: int, rope_dim: int, device: torch.device | str) -> LatentCache:
        """A zeroed cache of `num_blocks` blocks. Raises ValueError when the FP8 format meets other widths than 512 + 64."""
        if fmt is CacheFormat.FP8 and (latent_dim, rope_dim) != (FP8_LATENT_DIM, FP8_ROPE_DIM):
            raise ValueError(
                f"the fp8 cache needs kv_lora_rank 512 and qk_rope_head_dim 64, this model has {latent_dim} and "
                f"{rope_dim}; use the bf16 or fp32 cache"
            )
        return LatentCache(
            content=torch.zeros(num_blocks, BLOCK_SIZE, latent_dim, dtype=fmt.content_dtype, device=device),
            rope=torch.zeros(num_blocks, BLOCK_SIZE, rope_dim, dtype=fmt.rope_dtype, device=device),
            scale=torch.zeros(num_blocks, BLOCK_SIZE, device=device) if fmt is CacheFormat.FP8 else None,
        )

    @property
    def format(self) -> CacheFormat:
        return {FP8: CacheFormat.FP8, torch.bfloat16: CacheFormat.BF16}.get(self.content.dtype, CacheFormat.FP32)

    @property
    def num_blocks(self) -> int:
        return self.content.shape[0]

    @property
    def latent_dim(self) -> int:
        return self.content.shape[-1]

    @property
    def rope_dim(self) -> int:
        return self.rope.shape[-1]


@dataclass(frozen=True)
class ExactCopy:
    """Where appended rows also go unquantized: sequences that lie whole, one after the other, in an exact cache.

    cache:  an exact format, dense; position p of a sequence has slot start + p
    starts: int64 [T] slot of position 0 of each row's sequence, -1 for rows without a copy
    """

    cache: LatentCache
    starts: torch.Tensor


@dataclass(frozen=True)
class LatentQuery:
    """Absorbed queries in the domain of a cache format; any leading dimensions before H.

    content: E4M3 | BF16 | FP32 [..., H, C]  W_UK-absorbed query; real value = stored * scale
    rope:    BF16 | FP32        [..., H, R]  rotated query; real value = stored * scale
    scale:   FP32 [..., H], or None beside an exact cache
    """

    content: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor | None

    def unflatten(self, num_sequences: int, query_len: int) -> LatentQuery:
        """View [T, H, ...] as [B, S, H, ...] with T = B * S."""
        sizes = (num_sequences, query_len)
        return LatentQuery(
            self.content.unflatten(0, sizes),
            self.rope.unflatten(0, sizes),
            None if self.scale is None else self.scale.unflatten(0, sizes),
        )


@dataclass(frozen=True)
class BlockScaledWeight:
    """A weight in the published FP8 layout; real value = data * scale of its 128 x 128 block.

    data:  E4M3 [..., N, K]
    scale: FP32 [..., ceil(N / 128), ceil(K / 128)]  the checkpoint's `weight_scale_inv`, which multiplies
    """

    data: torch.Tensor
    scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain weight [..., N, K]; partial last blocks use the scale of their block."""
        rows, cols = self.data.shape[-2:]
        scale = self.scale.repeat_interleave(WEIGHT_BLOCK, -2)[..., :rows, :]
        scale = scale.repeat_interleave(WEIGHT_BLOCK, -1)[..., :cols]
        return (self.data.float() * scale).to(dtype)


Weight = torch.Tensor | BlockScaledWeight


@dataclass(frozen=True)
class QuantizedActivation:
    """Rows as a block-scaled FP8 product takes them; real value = data * scale of its 128 channels.

    data:  E4M3 [T, K], dense; the rows that round T up to a multiple of 4 are allocated behind it
    scale: FP32 [T, ceil(K / 128)], tokens adjacent in memory: strides (1, T rounded up to a multiple of 4)
    """

    data: torch.Tensor
    scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values [T, K] that the product sees."""
        scale = self.scale.repeat_interleave(WEIGHT_BLOCK, -1)[..., : self.data.shape[-1]]
        return (self.data.float() * scale).to(dtype)


@dataclass(frozen=True)
class Activation:
    """Rows [T, D] that were quantized where they were made, for the block-scaled products that read them.

    plain: BF16|FP32 [T, D] the same rows before that, for other readers; None when there are none
    dtype: of `plain`, and of what a product of these rows returns
    """

    quantized: QuantizedActivation
    plain: torch.Tensor | None
    dtype: torch.dtype

    def quantized_rows(self, rows: slice | torch.Tensor) -> Activation:
        """Some rows, by slice or index, without the plain ones."""
        q = self.quantized
        codes = q.data.view(torch.uint8)[rows].view(FP8)  # torch indexes no E4M3 on some devices
        return Activation(QuantizedActivation(codes, q.scale[rows]), None, self.dtype)


Rows = torch.Tensor | Activation  # input of a product


@dataclass(frozen=True)
class Routing:
    """Experts that T rows chose, and their weights, side by side so that one collective carries both.

    packed: int32 [T, 2 K]; the first K columns are the bits of FP32 weights, the others expert ids, -1 for nobody
    """

    packed: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        """FP32 [T, K], rows 2 K apart."""
        return self.packed[:, : self.packed.shape[1] // 2].view(torch.float32)

    @property
    def ids(self) -> torch.Tensor:
        """int32 [T, K], rows 2 K apart."""
        return self.packed[:, self.packed.shape[1] // 2 :]

    @staticmethod
    def of(weights: torch.Tensor, ids: torch.Tensor) -> Routing:
        return Routing(torch.cat((weights.view(torch.int32), ids), dim=1))


def plain_rows(x: Rows) -> torch.Tensor:
    """The unquantized rows. Whoever made an Activation for such a reader kept them."""
    if isinstance(x, torch.Tensor):
        return x
    assert x.plain is not None, "these rows were kept in quantized form only"
    return x.plain


@dataclass(frozen=True)
class DecodePlan:
    """Split-KV work plan of one step, shared by all layers; opaque to callers.

    Made by `ops.plan_decode` from the lengths on the device, so that a captured graph replays with new lengths.
    """

    work: torch.Tensor | None = None  # backend's device-side work list; None on the reference backend
    partial_out: torch.Tensor | None = None
    partial_lse: torch.Tensor | None = None
    batch_invariant: bool = False


MAX_EDITS = 1280  # single logits that a row changes


@dataclass(frozen=True)
class SamplingTable:
    """How the tokens of R rows are chosen, on the device, so that a captured graph follows what changes.

    temperature FP32 [R], 0: greedy; seeds int64 [R]
    min_p FP32 [R], 0: none; top_k int32 [R], the vocabulary: none; top_p FP64 [R], inf: none (1.0 would still drop tokens
        whose mass rounds to 0)
    repetition, presence, frequency: FP32 [R] penalties; 1, 0, 0: none
    history: int32 [R, V] how often a token was generated, the sign bit set where the prompt has it; kept for rows with penalties
    masked: bool [R]; masks: int32 [R, ceil(V / 32)], bit t % 32 of word t // 32 allows token t of a masked row
    num_edits: int32 [R]; edit_tokens int32, edit_values FP32, edit_until int64 [R, MAX_EDITS]: added to single logits of
        tokens before that position
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    history: torch.Tensor
    masked: torch.Tensor
    masks: torch.Tensor
    num_edits: torch.Tensor
    edit_tokens: torch.Tensor
    edit_values: torch.Tensor
    edit_until: torch.Tensor

    @staticmethod
    def allocate(num_rows: int, vocab_size: int, device: torch.device | str) -> SamplingTable:
        """Rows that are all greedy."""

        def full(value: float, dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.full((num_rows, *width), value, dtype=dtype, device=device)

        return SamplingTable(
            temperature=full(0.0, torch.float32),
            seeds=full(0, torch.int64),
            min_p=full(0.0, torch.float32),
            top_k=full(vocab_size, torch.int32),
            top_p=full(torch.inf, torch.float64),
            repetition=full(1.0, torch.float32),
            presence=full(0.0, torch.float32),
            frequency=full(0.0, torch.float32),
            history=torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device),
            masked=full(False, torch.bool),
            masks=torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device),
            num_edits=full(0, torch.int32),
            edit_tokens=full(0, torch.int32, MAX_EDITS),
            edit_values=full(0.0, torch.float32, MAX_EDITS),
            edit_until=full(0, torch.int64, MAX_EDITS),
        )

    @property
    def vocab_size(self) -> int:
        return self.history.shape[1]


@dataclass(frozen=True)
class Drafts:
    """Drafts of B sequences under verification: line j of a sequence's S lines follows its first j drafts.

    tokens: int64 [B, S - 1], any row stride; counts: int64 [B], tokens beyond it are padding
    probs: FP32 [R, depth, V] the distributions that each row's drafts were drawn from, under ratio acceptance; None: a draft
        is accepted where it equals the token chosen in its place
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    probs: torch.Tensor | None


@dataclass(frozen=True)
class DecodeLines:
    """Where the lines of B decode sequences stand, S lines each.

    positions: int64 [B, S], padding stays at the last live position; slots: int64 [B, S], -1 on padding
    live: bool [B, S]; seq_lens: int32 [B], 0 for a padded sequence
    num_drafts: int64 [B] that are verified; num_query: int32 [B], one more
    """

    positions: torch.Tensor
    slots: torch.Tensor
    live: torch.Tensor
    seq_lens: torch.Tensor
    num_drafts: torch.Tensor
    num_query: torch.Tensor
