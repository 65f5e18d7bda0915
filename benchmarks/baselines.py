"""Other MLA decode kernels behind one signature, used only where they are installed.

Each adapter takes the BF16 cache of workloads.py and returns one callable a block table, planned ahead of the timing like
ours. FlashMLA and FlashInfer read [pages, 64, 576] BF16; neither is a dependency.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import accumulate

import torch

from kernels.layout import BLOCK_SIZE, LatentCache, LatentQuery

Calls = list[Callable[[], object]]


def joined_cache(cache: LatentCache) -> torch.Tensor:
    """[pages, 64, 576]: latent and RoPE side by side, as the other kernels keep them."""
    return torch.cat((cache.content, cache.rope), -1)


def flash_mla(query: LatentQuery, joined: torch.Tensor, tables: list[torch.Tensor], lens: torch.Tensor, scale: float) -> Calls:
    """FlashMLA's dense decode. Older versions make the tiles' schedule in get_mla_metadata, newer ones in the first call."""
    import flash_mla

    q = torch.cat((query.content, query.rope), -1)
    schedule, splits = flash_mla.get_mla_metadata(lens, q.shape[1] * q.shape[2], 1)
    pages = joined.unsqueeze(2)  # one head of keys
    return [
        lambda t=t: flash_mla.flash_mla_with_kvcache(
            q, pages, t, lens, 512, tile_scheduler_metadata=schedule, num_splits=splits, softmax_scale=scale, causal=True
        )
        for t in tables
    ]


def flashinfer(query: LatentQuery, joined: torch.Tensor, tables: list[torch.Tensor], lens: torch.Tensor, scale: float) -> Calls:
    """FlashInfer's wrapper, one a table since its plan holds the page numbers; they share what a call leaves behind."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    batch, rows, heads, _ = query.content.shape
    q, q_rope = query.content.flatten(0, 1), query.rope.flatten(0, 1)
    latent, rope = joined[..., :512], joined[..., 512:]
    counts = [-(-n // BLOCK_SIZE) for n in lens.tolist()]
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=q.device)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    calls: Calls = []
    for table in tables:
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        wrapper.plan(
            qo_indptr=torch.arange(0, batch + 1, device=q.device, dtype=torch.int32) * rows,
            kv_indptr=starts, kv_indices=torch.cat([table[i, :count] for i, count in enumerate(counts)]), kv_len_arr=lens,
            num_heads=heads, head_dim_ckv=512, head_dim_kpe=64, page_size=BLOCK_SIZE, causal=True, sm_scale=scale,
            q_data_type=q.dtype, kv_data_type=latent.dtype,
        )  # fmt: skip
        calls.append(lambda w=wrapper: w.run(q, q_rope, latent, rope))
    return calls


ADAPTERS: dict[str, Callable[..., Calls]] = {"flash_mla": flash_mla, "flashinfer": flashinfer}


def installed() -> dict[str, Callable[..., Calls]]:
    """The adapters whose package is here; says which are not."""
    found = {name: adapter for name, adapter in ADAPTERS.items() if importlib.util.find_spec(name)}
    for name in ADAPTERS.keys() - found.keys():
        print(f"{name}: not installed, its kernel is left out", flush=True)
    return found
