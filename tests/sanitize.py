"""Runs every Hopper kernel under compute-sanitizer: `python -m tests.sanitize` on an H100 or H200.

Each tool runs `python -m tests.sanitize --work` in a process of its own: small problems that take every path (splits, tails,
masks, empty rows, both formats). Exit status 1 when a tool reports an error or cannot run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import torch

from kernels import ops
from kernels.layout import CacheFormat
from tests.kernels import cases

KERNELS = (
    "mla_decode",
    "plan_decode",
    "combine_decode",
    "append_kv",
    "quantize_q",
    "fetch_dequant",
    "rms_norm",
    "rope",
    "silu",
    "merge",
)
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")


def work() -> None:
    """One pass over the kernels; results are checked elsewhere."""
    device = "cuda"
    table = torch.randn(512, 64, device=device)
    for fmt in (CacheFormat.FP8, CacheFormat.BF16):
        for lens, heads, query_len, invariant in (
            ([0, 1, 130, 700], 16, 2, False),
            ([1, 200], 16, 1, False),
            ([1, 200], 64, 1, False),
            ([3000], 128, 1, False),
            ([65] * 3, 64, 4, True),
        ):
            p = cases.random_problem(lens, heads, query_len, fmt=fmt)
            plan = ops.plan_decode(p.seq_lens, query_len=query_len, num_heads=heads, fmt=fmt, batch_invariant=invariant)
            ops.mla_decode(
                p.query, p.cache, p.block_table, p.seq_lens, softmax_scale=p.softmax_scale, causal=True, plan=plan,
                out_dtype=torch.bfloat16,
            )  # fmt: skip
        x, positions = torch.randn(70, 576, device=device).bfloat16(), torch.arange(70, device=device)
        ops.append_kv(p.cache, x[:, :512], x[:, 512:], x[0, :512].contiguous(), positions, table, positions, eps=1e-6, keep=3)
        ops.quantize_q(
            torch.randn(5, 16, 512, device=device), torch.randn(5, 16, 64, device=device), positions[:5], table, fmt=fmt
        )
        cu_lens = torch.tensor([0, 40, 65], dtype=torch.int32, device=device)
        starts = torch.tensor([3, 0], dtype=torch.int32, device=device)
        ops.fetch_dequant(p.cache, p.block_table[:2], starts, cu_lens, total=65, dtype=torch.bfloat16)
    x = torch.randn(9, 1536, device=device).bfloat16()
    ops.rms_norm(x, x[0].clone(), eps=1e-6, residual=x.clone())
    ops.silu_and_mul(x)
    ops.rope(x[:, :64].contiguous(), positions[:9], table, interleaved=True)
    out, lse = torch.randn(9, 4, 128, device=device), torch.randn(9, 4, device=device)
    ops.merge_attention(out, lse, out.clone(), lse.clone())
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", action="store_true", help="run the kernels in this process")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    args = parser.parse_args()
    if args.work:
        work()
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH")
        return 1
    failed = []
    for tool in args.tools:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
        if tool != "initcheck":  # which must see torch's kernels write what ours read
            for name in KERNELS:
                command += ["--kernel-regex", f"kns={name}"]
        done = subprocess.run([*command, sys.executable, "-m", "tests.sanitize", "--work"], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        print(
            f"{tool}: exit {done.returncode}",
            *[x for x in lines if "SUMMARY" in x or "hazard" in x.lower()][:12],
            sep="\n  ",
            flush=True,
        )
        if done.returncode:
            failed.append(tool)
            print("\n".join(lines[:80]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
