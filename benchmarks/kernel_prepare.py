"""The fused kernels around the latent cache on one GPU: `python -m benchmarks.kernel_prepare`.

Times quantize_q, append_kv and fetch_dequant at decode and prefill sizes beside the same work as separate torch operations
(the reference backend on the device) and beside the copy bandwidth of the same run. Bytes: each input read once, positions,
slots and the rotation's table among them, each output written once. Appends one JSON line a case to results/kernel_prepare.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, Log, copy_rate, eager, steady
from kernels import ops
from kernels.layout import CacheFormat, LatentCache

FP8 = CacheFormat.FP8
L2_BYTES = 60 << 20
PROMPT = 8192


def sets_for(size: int) -> int:
    """Input sets to rotate so that the L2 cache holds none of the next, within reason."""
    return max(1, min(64, -(-3 * L2_BYTES // size)))


def cos_sin_table(positions: int = 65536) -> torch.Tensor:
    angle = torch.arange(positions, device="cuda")[:, None] / 10000 ** (torch.arange(0, 64, 2, device="cuda") / 64)
    return torch.cat((angle.cos(), angle.sin()), -1).float()


def quantize_q_case(tokens: int, heads: int) -> tuple[int, list[Callable[[], object]]]:
    table, positions = cos_sin_table(), torch.randint(0, 65536, (tokens,), device="cuda")
    size = tokens * heads * (2 * 576 + 512 + 128 + 4)
    inputs = [
        (
            torch.randn(heads, tokens, 512, device="cuda", dtype=torch.bfloat16).transpose(0, 1),
            torch.randn(tokens, heads, 192, device="cuda", dtype=torch.bfloat16)[..., 128:],
        )
        for _ in range(sets_for(size))
    ]
    return size, [lambda c=c, r=r: ops.quantize_q(c, r, positions, table, fmt=FP8) for c, r in inputs]


def append_kv_case(tokens: int, *, scattered: bool = False) -> tuple[int, list[Callable[[], object]]]:
    """Prompts of PROMPT tokens, blocks in random order; scattered: every token at a slot and position of its own, as in a
    decode step. Bytes count the rotation table's rows once, which is what comes from memory where the L2 cache keeps them."""
    table = cos_sin_table()
    weight = torch.rand(512, device="cuda")
    size = tokens * (2 * 576 + 8 + 8 + 644) + min(tokens, len(table) if scattered else PROMPT) * table[0].nbytes
    blocks = max(1024, 2 * -(-tokens // 64))
    cache = LatentCache.allocate(FP8, blocks, 512, 64, "cuda")
    offsets = torch.arange(64, device="cuda")

    def places() -> tuple[torch.Tensor, torch.Tensor]:
        if scattered:
            return torch.randint(0, len(table), (tokens,), device="cuda"), torch.randperm(blocks * 64, device="cuda")[:tokens]
        slots = (torch.randperm(blocks, device="cuda")[:, None] * 64 + offsets).flatten()[:tokens]
        return torch.arange(tokens, device="cuda") % PROMPT, slots

    inputs = [(torch.randn(tokens, 576, device="cuda", dtype=torch.bfloat16), *places()) for _ in range(sets_for(size))]
    return size, [
        lambda x=x, p=p, s=s: ops.append_kv(cache, x[:, :512], x[:, 512:], weight, p, table, s, eps=1e-6) for x, p, s in inputs
    ]


def fetch_dequant_case(tokens: int) -> tuple[int, list[Callable[[], object]]]:
    size = tokens * (644 + 2 * 576)
    blocks = -(-tokens // 64)
    pool = max(8192, 2 * blocks)
    cache = LatentCache.allocate(FP8, pool, 512, 64, "cuda")
    cache.content.view(torch.uint8).random_(0, 120)
    starts = torch.zeros(1, dtype=torch.int32, device="cuda")
    cu_lens = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    tables = [torch.randperm(pool, device="cuda")[:blocks].int().view(1, -1) for _ in range(sets_for(size))]
    return size, [lambda t=t: ops.fetch_dequant(cache, t, starts, cu_lens, total=tokens, dtype=torch.bfloat16) for t in tables]


CASES = {
    "quantize_q, 32 x 128": lambda: quantize_q_case(32, 128),
    "quantize_q, 32 x 16": lambda: quantize_q_case(32, 16),
    "quantize_q, 4096 x 128": lambda: quantize_q_case(4096, 128),
    "append_kv, 32": lambda: append_kv_case(32, scattered=True),
    "append_kv, 256": lambda: append_kv_case(256, scattered=True),
    "append_kv, 262144": lambda: append_kv_case(262144),
    "append_kv, 262144 scattered": lambda: append_kv_case(262144, scattered=True),
    "fetch_dequant, 4096": lambda: fetch_dequant_case(4096),
    "fetch_dequant, 262144": lambda: fetch_dequant_case(262144),
}


def separate_steps(calls: list[Callable[[], object]]) -> float:
    """Microseconds of the same work as torch operations, launched from Python (some read a count back)."""
    with ops.backend("reference"):
        return eager(calls[: min(8, len(calls))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "kernel_prepare.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    log, copy = Log(args.output), copy_rate()
    print(f"copy {copy:.2f} TB/s, read plus write", flush=True)
    for name, make in CASES.items():
        size, calls = make()
        timing = steady(calls)
        torch_us = separate_steps(calls)
        rate = size / timing.us * 1e-6
        log.write(
            case=name, us=timing.us, bytes=size, tb_per_s=rate, of_copy=rate / copy, torch_us=torch_us, copy_tb_per_s=copy
        )
        print(
            f"{name:<27} {timing.us:8.2f} us  {rate:5.2f} TB/s  {rate / copy:5.2f} of copy   torch steps, eager {torch_us:.1f} us",
            flush=True,
        )
        del calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
