"""Other MLA decode kernels behind one signature, used only where they are installed.

Each adapter takes the BF16 cache of workloads.py and returns one callable a block table, planned ahead of the timing like
ours. FlashMLA and FlashInfer read [pages, 64, 576] BF16; neither is a dependency.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from kernels.layout import BLOCK_SIZE, LatentCache, LatentQuery

Calls = list[Callable[[], object]]


def joined_cache(cache: LatentCache) -> torch.Tensor:
    """[pages, 64, 576]: latent and RoPE side by side, as the other kernels keep them."""
    return torch.cat((cache.content, cache.rope), -1)


def flash_mla(query: LatentQuery, joined: torch.Tensor, tables: list[torch.Tensor], lens: torch.Tensor, scale: float) -> Calls:
    import flash_mla

    q = torch.cat((query.content, query.rope), -1)
    heads = q.shape[1] * q.shape[2]
    metadata, splits = flash_mla.get_mla_metadata(lens, heads, 1)
    kv = joined.unsqueeze(2)
    return [
        lambda t=t: flash_mla.flash_mla_with_kvcache(q, kv, t, lens, 512, metadata, splits, softmax_scale=scale, causal=True)
        for t in tables
    ]


def flashinfer(query: LatentQuery, joined: torch.Tensor, tables: list[torch.Tensor], lens: torch.Tensor, scale: float) -> Calls:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    b, s, h, _ = query.content.shape
    q, q_rope = query.content.flatten(0, 1), query.rope.flatten(0, 1)
    latent, rope = joined[..., :512], joined[..., 512:]
    calls = []
    for table in tables:
        used = (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        indices = torch.cat([table[i, : int(n)] for i, n in enumerate(used.tolist())])
        wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa3")
        wrapper.plan(
            torch.arange(0, b + 1, device="cuda", dtype=torch.int32) * s,
            torch.nn.functional.pad(used.cumsum(0), (1, 0)).int(), indices, lens, h, 512, 64, BLOCK_SIZE, True, scale,
            torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        calls.append(lambda w=wrapper: w.run(q, q_rope, latent, rope))
    return calls


def installed() -> dict[str, Callable[..., Calls]]:
    """The adapters whose package is here."""
    known = {"flash_mla": flash_mla, "flashinfer": flashinfer}
    return {name: adapter for name, adapter in known.items() if importlib.util.find_spec(name)}
