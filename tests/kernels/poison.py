"""Free device memory filled with NaN, so that an output element nobody wrote shows."""

from __future__ import annotations

import torch


def poison_free_memory() -> None:
    """Fill what the caching allocator will hand out next: one large block, and the pool of small ones.

    0xFF bytes are NaN in FP32, BF16 and E4M3, and -1 as an integer.
    """
    torch.cuda.empty_cache()
    blocks = [torch.full((1 << 28,), 0xFF, dtype=torch.uint8, device="cuda")]
    blocks += [
        torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in (512, 4096, 65536, 1 << 19) for _ in range(8)
    ]
    del blocks
