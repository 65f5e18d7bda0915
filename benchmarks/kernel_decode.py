"""MLA decode on one Hopper GPU: `python -m benchmarks.kernel_decode`.

Times one decode call (attention and combine; the plan is made once a step for all layers and is timed apart) beside the
ceilings of the same run: the page reads alone, the BF16 and FP8 matrix products. FLOP = 2 * rows * tokens * (576 + 512).
Appends one JSON line a case to results/kernel_decode.jsonl. Other kernels are timed too where they are installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import baselines, workloads
from benchmarks.harness import RESULTS, Log, matmul_rate, steady
from kernels import ops
from kernels.cuda import binding, mla_decode
from kernels.layout import CacheFormat, LatentCache

SCALE = 192**-0.5
FLOP = 2 * (576 + 512)
FP8_OVER_BF16 = 17 / 9  # of the tensor work of a tile, 512 + 512 of 576 + 512 dims run at twice the BF16 rate


def paged_read_rate(cache: LatentCache) -> float:
    """TB/s of the decode kernels' page fetches alone, pages in random order."""
    args = mla_decode.PagedReadArgs()
    mla_decode.fill_maps("paged_read", args, cache)
    if cache.scale is not None:
        args.scales, args.scale_stride = cache.scale.data_ptr(), cache.scale.stride(0)
    pages = torch.randperm(cache.num_blocks, device="cuda").int()
    args.pages, args.count = pages.data_ptr(), pages.numel()
    kernel = binding.kernel("paged_read", "paged_read", 0)
    timing = steady([lambda: kernel.launch(binding.sm_count(0), 32, args)])
    return pages.numel() * 64 * cache.format.bytes_per_token(512, 64) / timing.us * 1e-6


def decode_calls(
    cache: LatentCache, lens: list[int], heads: int, query_len: int, invariant: bool = False
) -> list[Callable[[], object]]:
    """One call a rotated block table."""
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    query = workloads.random_query(cache.format, len(lens), query_len, heads)
    plan = ops.plan_decode(seq_lens, query_len=query_len, num_heads=heads, fmt=cache.format, batch_invariant=invariant)
    tables = workloads.block_tables(lens, cache.num_blocks, cache.format.bytes_per_token(512, 64))
    return [
        lambda t=t: ops.mla_decode(
            query, cache, t, seq_lens, softmax_scale=SCALE, causal=True, plan=plan, out_dtype=torch.bfloat16
        )
        for t in tables
    ]


class Bench:
    """Runs cases of one cache format and prints a row each."""

    def __init__(self, fmt: CacheFormat, log: Log, blocks: int, peers: bool) -> None:
        self.cache, self.log, self.fmt = workloads.random_cache(fmt, blocks), log, fmt
        self.read_rate = paged_read_rate(self.cache)
        self.matmul = matmul_rate(torch.bfloat16)
        self.peers = baselines.installed() if peers and fmt is CacheFormat.BF16 else {}
        self.joined = baselines.joined_cache(self.cache) if self.peers else None
        print(f"{fmt.value}: paged read {self.read_rate:.2f} TB/s, BF16 matmul {self.matmul:.0f} TFLOP/s", flush=True)

    def case(self, name: str, lens: list[int], heads: int, query_len: int = 1, invariant: bool = False) -> None:
        self._time(name, "ours", decode_calls(self.cache, lens, heads, query_len, invariant), lens, heads, query_len)
        for peer, adapter in self.peers.items():
            query = workloads.random_query(self.fmt, len(lens), query_len, heads)
            tables = workloads.block_tables(lens, self.cache.num_blocks, 1152)
            calls = adapter(query, self.joined, tables, torch.tensor(lens, dtype=torch.int32, device="cuda"), SCALE)
            self._time(name, peer, calls, lens, heads, query_len)

    def _time(
        self, name: str, kernel: str, calls: list[Callable[[], object]], lens: list[int], heads: int, query_len: int
    ) -> None:
        timing = steady(calls)
        tflops = FLOP * heads * query_len * sum(lens) / timing.us * 1e-6
        tbs = sum(lens) * self.fmt.bytes_per_token(512, 64) / timing.us * 1e-6
        tensor = self.matmul * (FP8_OVER_BF16 if self.fmt is CacheFormat.FP8 else 1.0)
        self.log.write(
            case=name, kernel=kernel, format=self.fmt.value, batch=len(lens), tokens=sum(lens), longest=max(lens), heads=heads,
            query_len=query_len, us=timing.us, us_quartiles=(timing.low, timing.high), tflops=tflops, tb_per_s=tbs,
            of_read_rate=tbs / self.read_rate, of_tensor_rate=tflops / tensor, sm_mhz=timing.clock_mhz,
            read_rate_tb_per_s=self.read_rate, bf16_matmul_tflops=self.matmul,
        )  # fmt: skip
        print(
            f"{self.fmt.value} {name:<14} {kernel:<6} B {len(lens):>3} H {heads:>3} q {query_len}  {timing.us:8.1f} us  {tflops:6.0f} TFLOP/s "
            f"{tflops / tensor:5.2f}  {tbs:5.2f} TB/s {tbs / self.read_rate:5.2f}  {timing.clock_mhz or 0} MHz",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=["fp8", "bf16"], default=["fp8", "bf16"])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--short", action="store_true", help="the cases of the speed targets only")
    parser.add_argument("--blocks", type=int, default=workloads.POOL_BLOCKS, help="cache blocks of the pool")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "kernel_decode.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    log = Log(args.output)
    ragged = workloads.ragged_lengths()
    for fmt in args.formats:
        bench = Bench(CacheFormat(fmt), log, args.blocks, not args.no_peers)
        for heads in args.heads:
            for query_len in (1, 2):
                for length in workloads.lengths_grid(args.short):
                    if not args.short or query_len == 1 or (heads == 128 and length == 32768):
                        bench.case(f"{length // 1024}k", [length] * 32, heads, query_len)
        for batch in (1,) if args.short else (1, 2, 4, 8, 16, 64, 128):
            for length in (4096, 16384, 65536):
                bench.case(f"{length // 1024}k", [length] * batch, 128)
        for heads in (16, 64, 128):
            bench.case("ragged", ragged, heads)
        bench.case("32k invariant", [32768] * 32, 128, invariant=True)
        lens = torch.tensor(ragged, dtype=torch.int32, device="cuda")
        plan = steady([lambda n=lens, f=fmt: ops.plan_decode(n, query_len=1, num_heads=128, fmt=CacheFormat(f))] * 16)
        print(f"plan of the ragged batch {plan.us:.1f} us", flush=True)
        log.write(case="plan, ragged", format=fmt, us=plan.us)
        del bench
        torch.cuda.empty_cache()
    print(f"FP8 matmul {matmul_rate(torch.float8_e4m3fn):.0f} TFLOP/s")


if __name__ == "__main__":
    main()
