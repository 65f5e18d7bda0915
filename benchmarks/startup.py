"""Start-up of a worker, in pieces: `python -m benchmarks.startup [--model SHAPE] [--world dp=8,tp=1]`.

A worker is built as the engine builds it, on one device as one simulated rank with dummy weights (or, without `--world`, a
real checkpoint): model, a step of the largest size to learn what activations need, cache. Then the CUDA graphs of the default
set and of `--fast-start` are captured, and the device memory they take is read from the driver. A demo model of the bundled
weights takes the same way: `--model demo --world ""`.

Appends one JSON line to results/startup.jsonl. The first run on a machine compiles the kernels too.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RESULTS, Records
from benchmarks.workloads import SHAPES
from engine.config import EngineConfig, SchedulerConfig
from engine.worker import build_worker, create_context

METHOD = "build_worker without graphs, then both captures on the same runner; graph memory from the driver's free bytes"


def free_bytes() -> int:
    """Of the device, after everything that torch holds for nobody was given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def measure(config: EngineConfig) -> dict[str, Any]:
    """The fields of a line."""
    began = time.perf_counter()
    executor, info = build_worker(config, create_context(config, config.device))
    found: dict[str, Any] = {
        "worker_seconds": time.perf_counter() - began,
        "num_blocks": info.num_blocks,
        "cache_format": info.cache_format,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "num_speculative_tokens": config.num_speculative_tokens,
        "layers": info.model_config.num_decoder_layers,
    }
    if info.device == "cpu":
        return found
    runner = executor._runner
    for name, fast in (("fast", True), ("all", False)):
        runner._graphs = None
        before = free_bytes()
        found[f"{name}_graphs_seconds"] = runner.capture_graphs(show_progress=True, fast_start=fast)
        found[f"{name}_graphs"] = runner.num_graphs
        found[f"{name}_graphs_bytes"] = before - free_bytes()
    found["allocated_bytes"] = torch.cuda.memory_allocated()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepseek_v3.1", help="name under benchmarks/shapes, a folder, or demo")
    parser.add_argument("--world", default="dp=8,tp=1", help='deployment whose rank is simulated; "" loads real weights')
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument("--num-cache-blocks", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output", type=Path, default=RESULTS / "startup.jsonl")
    args = parser.parse_args(argv)
    folder = SHAPES / args.model
    config = EngineConfig(
        str(folder) if folder.is_dir() else args.model,
        device=args.device,
        load_format="dummy" if args.world else "auto",
        simulate_world=args.world,
        num_cache_blocks=args.num_cache_blocks,
        num_speculative_tokens=args.num_speculative_tokens,
        cuda_graphs=False,
        scheduler=SchedulerConfig(max_num_seqs=args.max_num_seqs),
    )
    found = measure(config)
    device = "cuda" if "all_graphs" in found else "cpu"
    Records(args.output, device=device, method=METHOD, seed=0).write(
        figure="startup", model=Path(args.model).name, world=args.world, **found
    )
    print(
        f"{args.model} {args.world}: worker built in {found['worker_seconds']:.1f} s, {found['num_blocks']} blocks", flush=True
    )
    for name in ("fast", "all"):
        if device == "cuda":
            print(
                f"  {found[f'{name}_graphs']} graphs ({name}): {found[f'{name}_graphs_seconds']:.1f} s, "
                f"{found[f'{name}_graphs_bytes'] / 1e9:.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
