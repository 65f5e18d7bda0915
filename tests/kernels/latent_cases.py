"""Decode problems written through append_kv and quantize_q: paged caches whose unused slots and table entries are poisoned.

Blocks are permuted, a block's stride may be larger than a block, and whatever must not be read holds NaN or a table entry
no allocator would give out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, DecodePlan, LatentCache, LatentQuery

NUM_POSITIONS = 512


@dataclass(frozen=True)
class DecodeCase:
    """Arguments of mla_decode."""

    query: LatentQuery
    cache: LatentCache
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_query: torch.Tensor | None
    softmax_scale: float

    @property
    def args(self) -> tuple:
        return self.query, self.cache, self.block_table, self.seq_lens, self.num_query

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.mla_decode(
            *self.args, softmax_scale=self.softmax_scale, causal=True, plan=DecodePlan(), out_dtype=torch.float32
        )  # fmt: skip


def angle_table(rope_dim: int) -> torch.Tensor:
    """cos_sin FP32 [NUM_POSITIONS, R] of random angles, so that a swapped position shows."""
    angles = torch.rand(NUM_POSITIONS, rope_dim // 2) * 6.28
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def poisoned_cache(fmt: CacheFormat, num_blocks: int, latent_dim: int, rope_dim: int, padding: int = 0) -> LatentCache:
    """Every value NaN; `padding` extra tokens between blocks make the block stride larger than a block."""
    cache = LatentCache.allocate(fmt, num_blocks, latent_dim, rope_dim, "cpu")
    parts = []
    for part in (cache.content, cache.rope, cache.scale):
        if part is not None:
            storage = torch.empty(num_blocks, BLOCK_SIZE + padding, *part.shape[2:], dtype=part.dtype)
            storage.view(torch.uint8).fill_(0xFF)  # NaN in every format used
            part = storage[:, :BLOCK_SIZE]
        parts.append(part)
    return LatentCache(*parts)


def decode_case(
    fmt: CacheFormat,
    lens: list[int],
    *,
    query_len: int = 1,
    heads: int = 4,
    num_query: list[int] | None = None,
    softmax_scale: float = 0.13,
    content_mean: float = 0.3,
    rope_gain: float = 1.0,
    padding: int = 0,
) -> DecodeCase:
    """Sequences of the given lengths with random keys of the published widths."""
    needed = [-(-n // BLOCK_SIZE) for n in lens]
    cache = poisoned_cache(fmt, sum(needed) + 3, 512, 64, padding)
    order = torch.randperm(cache.num_blocks).tolist()
    table = torch.full((len(lens), max(needed, default=0) + 2), -(2**30), dtype=torch.int32)
    cos_sin = angle_table(64)
    for i, (length, blocks) in enumerate(zip(lens, needed)):
        table[i, :blocks] = torch.tensor([order.pop() for _ in range(blocks)], dtype=torch.int32)
        position = torch.arange(length)
        slots = table[i, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        latent = torch.randn(length, 512) + content_mean
        k_rope = torch.randn(length, 64) * rope_gain
        ops.append_kv(cache, latent, k_rope, torch.ones(512), position % NUM_POSITIONS, cos_sin, slots, eps=1e-6)
    rows = len(lens) * query_len
    query = ops.quantize_q(
        torch.randn(rows, heads, 512) * 0.2, torch.randn(rows, heads, 64), torch.arange(rows), cos_sin, fmt=fmt
    )  # fmt: skip
    return DecodeCase(
        query.unflatten(len(lens), query_len),
        cache,
        table,
        torch.tensor(lens, dtype=torch.int32),
        None if num_query is None else torch.tensor(num_query, dtype=torch.int32),
        softmax_scale,
    )
