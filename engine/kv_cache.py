"""The paged latent cache of a rank: one LatentCache per attention layer, and how many blocks memory allows.

All layers share one block table, so a block id means the same 64 tokens in every layer. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import ConfigError
from kernels.layout import BLOCK_SIZE, CacheFormat, LatentCache
from models.config import ModelConfig

CPU_CACHE_BYTES = 1 << 30  # default on a CPU, where "free memory" belongs to everybody


def num_cache_layers(model: ModelConfig, num_speculative_tokens: int) -> int:
    """Layers that own a cache: every attention of the model, and the draft layer when the model drafts for itself."""
    return model.num_attention_layers + (1 if num_speculative_tokens else 0)


def bytes_per_token(model: ModelConfig, fmt: CacheFormat, num_speculative_tokens: int = 0) -> int:
    """Bytes that one cached token takes on a rank, over all layers. Tensor parallelism replicates the cache."""
    layers = num_cache_layers(model, num_speculative_tokens)
    return layers * fmt.bytes_per_token(model.kv_lora_rank, model.qk_rope_head_dim)


def num_blocks_for(memory_bytes: int, block_bytes: int, most: int) -> int:
    """Usable blocks in `memory_bytes`, one null block set aside, at most `most`. Raises ConfigError when not one fits."""
    blocks = memory_bytes // block_bytes - 1
    if blocks < 1:
        raise ConfigError(
            f"the cache has {max(0, memory_bytes)} bytes, one block of {BLOCK_SIZE} tokens takes {block_bytes} and two are the "
            "least: raise cache_memory_bytes or memory_fraction, use more ranks, or use the fp8 cache"
        )
    return min(blocks, most)


@dataclass(frozen=True)
class KVCache:
    """layers: one LatentCache per cache layer, each of num_blocks + 1 blocks.

    Block ids 0 .. num_blocks - 1 belong to the block manager; id num_blocks is the null block, which fills unused table
    entries so that every id in a table is readable. Its content is never used.
    """

    layers: list[LatentCache]
    num_blocks: int

    @staticmethod
    def allocate(
        model: ModelConfig, fmt: CacheFormat, num_blocks: int, device: torch.device, num_speculative_tokens: int = 0
    ) -> KVCache:
        """Zeroed caches. Raises ConfigError when the model's widths do not fit the format."""
        try:
            layers = [
                LatentCache.allocate(fmt, num_blocks + 1, model.kv_lora_rank, model.qk_rope_head_dim, device)
                for _ in range(num_cache_layers(model, num_speculative_tokens))
            ]
        except ValueError as error:
            raise ConfigError(f"cache_format: {error}") from error
        return KVCache(layers, num_blocks)

    @property
    def null_block(self) -> int:
        return self.num_blocks

    @property
    def format(self) -> CacheFormat:
        return self.layers[0].format
