"""Shapes of the decode benchmarks, and a random paged cache to run them on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from kernels.layout import BLOCK_SIZE, CacheFormat, LatentCache, LatentQuery

SHAPES = Path(__file__).parent / "shapes"  # published config.json files, for dummy weights
POOL_BLOCKS = 132_096
ROTATED_BYTES, MAX_SETS = 1 << 30, 128  # between two reads of a block lie this many bytes, unless it takes more sets


def tiny_shape(folder: Path) -> Path:
    """DeepSeek-V3.1's architecture in sizes for a dry run."""
    raw = json.loads((SHAPES / "deepseek_v3.1" / "config.json").read_text())
    raw |= {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "moe_intermediate_size": 64,
        "num_attention_heads": 8, "n_routed_experts": 16, "first_k_dense_replace": 1, "q_lora_rank": 32, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    del raw["quantization_config"]
    tiny = folder / "tiny"
    tiny.mkdir(parents=True, exist_ok=True)
    (tiny / "config.json").write_text(json.dumps(raw))
    return tiny


def cut_layers(name: str, layers: int, folder: Path) -> Path:
    """A published shape with the first `layers` of its layers, in a folder of `folder` whose name tells."""
    raw = json.loads((SHAPES / name / "config.json").read_text())
    raw["num_layers" if "num_layers" in raw else "num_hidden_layers"] = layers
    cut = folder / f"{name}-{layers}layers"
    cut.mkdir(parents=True, exist_ok=True)
    (cut / "config.json").write_text(json.dumps(raw))
    return cut


def lengths_grid(short: bool) -> list[int]:
    """Context lengths of the batch-32 grid."""
    return [1024, 4096, 32768] if short else [1024 << i for i in range(8)]


def ragged_lengths(count: int = 32, low: int = 512, high: int = 65536, seed: int = 0) -> list[int]:
    """Log-uniform lengths of a mixed batch."""
    gen = torch.Generator().manual_seed(seed)
    return [int(low * (high / low) ** u) for u in torch.rand(count, generator=gen).tolist()]


def random_cache(fmt: CacheFormat, blocks: int = POOL_BLOCKS) -> LatentCache:
    """Normal latents of unit variance; RoPE in the domain of the format."""
    cache = LatentCache(
        torch.empty(blocks, BLOCK_SIZE, 512, dtype=fmt.content_dtype, device="cuda"),
        torch.empty(blocks, BLOCK_SIZE, 64, dtype=fmt.rope_dtype, device="cuda"),
        torch.empty(blocks, BLOCK_SIZE, device="cuda") if fmt is CacheFormat.FP8 else None,
    )
    fill_random(cache)
    return cache


def fill_random(cache: LatentCache) -> None:
    """Overwrite every block of a cache."""
    fmt, device = cache.format, cache.content.device
    if cache.scale is not None:
        cache.scale.uniform_(0.007, 0.013)
    for i in range(0, cache.num_blocks, 4096):
        part = slice(i, i + 4096)
        content, rope = (torch.randn(values[part].shape, device=device) for values in (cache.content, cache.rope))
        if cache.scale is None:
            cache.content[part], cache.rope[part] = content.to(fmt.content_dtype), rope.to(fmt.rope_dtype)
        else:
            cache.content.view(torch.uint8)[part] = (content * 100).clamp(-448, 448).to(fmt.content_dtype).view(torch.uint8)
            cache.rope[part] = (rope / cache.scale[part].unsqueeze(-1)).bfloat16()


def random_query(fmt: CacheFormat, batch: int, query_len: int, heads: int) -> LatentQuery:
    shape = (batch, query_len, heads)
    content, rope = torch.randn(*shape, 512, device="cuda"), torch.randn(*shape, 64, device="cuda")
    if fmt is not CacheFormat.FP8:
        return LatentQuery(content.to(fmt.content_dtype), rope.to(fmt.rope_dtype), None)
    scale = torch.empty(shape, device="cuda").uniform_(0.007, 0.013)
    return LatentQuery((content * 100).clamp(-448, 448).to(fmt.content_dtype), (rope / scale.unsqueeze(-1)).bfloat16(), scale)


def block_tables(lens: list[int], pool_blocks: int, bytes_per_token: int, seed: int = 0) -> list[torch.Tensor]:
    """Block tables for rotated calls: random pages of the pool, so many sets that the L2 cache holds none of the next."""
    sets = min(MAX_SETS, max(2, math.ceil(ROTATED_BYTES / (sum(lens) * bytes_per_token))))
    gen = torch.Generator().manual_seed(seed)
    order = torch.randperm(pool_blocks, generator=gen).int()
    width, at, tables = -(-max(lens) // BLOCK_SIZE), 0, []
    for _ in range(sets):
        table = torch.full((len(lens), width), -1, dtype=torch.int32)
        for i, n in enumerate(lens):
            need = -(-n // BLOCK_SIZE)
            if at + need > pool_blocks:
                at = 0
            table[i, :need] = order[at : at + need]
            at += need
        tables.append(table.cuda())
    return tables
