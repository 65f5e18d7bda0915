"""The whole decode step against its roofline: `python -m benchmarks.decode`, one GPU, or several under torchrun.

Loads published shapes with dummy FP8 weights: on one device as one simulated rank of `--world` (its weights, its experts'
load, no collectives), under torchrun (`--real`) as all ranks of it. Steps are hand-made plans on the engine's ModelRunner:
lengths are set directly and the cache is filled with random values, so nothing is prefilled. As in the engine, a step is
submitted before the last one's result is read, decode steps replay CUDA graphs, and every row is sampled greedily; the
scheduler's own time (benchmarks/scheduler.py) is not in it.

Batches: `--batches` (at 32k alone where that is among the contexts), and where they differ "equal" (the largest that fits the
BF16 cache, for both formats) and "largest" (that fits each format), all in the same bytes of cache; a batch that is several of
these is measured once. Every line: step time (median of windows), tokens/s per GPU, roofline (sum over parts of the larger of bytes / read rate and FLOPs / matmul
rate, measured in this run), each operation's and part's time alone, the largest kernels, and two views of the time in which
the device waits:

    host_gap         share in which no kernel runs, between the first and the last one of a few steps that the profiler saw: host,
                     launches and gaps inside the graph alike
    host_gap_events  share of the measured steps' time that lies between the events around each step; dry_steps counts those
                     whose predecessor had ended before they were enqueued, the only ones for which the device waits

At the end of a world come its ratios: at equal batch, attention's time with the BF16 cache over that with the FP8 cache, alone
(61 layers back to back, which throttles the card more) and as the profiler saw it in the step; at equal memory, tokens/s of the largest batches, beside the ratio that the two rooflines allow.

One JSON line a case is appended to results/decode.jsonl, figure "decode" or, with what was raised, "decode_failed"; cases that
are there already, for this device and revision, are skipped, so a run that was stopped goes on. A case that fails ends the
ranks, whose collectives no longer match; one simulated rank goes on with the next case. An H200 takes about 3 s a case and 3 s
a world (`--quick`: about 40 s); all shapes at all contexts are about 80 cases, 4 minutes, a world's most wanted ones first.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.records import RESULTS, Records
from benchmarks.step_parts import Ceilings, Recorder, break_down, component_of, parts_of, profile
from benchmarks.workloads import SHAPES, fill_random
from engine.config import EngineConfig, ParallelConfig
from engine.kv_cache import KVCache, bytes_per_token
from engine.model_runner import ModelRunner, PendingStep
from engine.preflight import choose_device
from engine.worker import create_context, resolve_device, resolve_dtype
from kernels.layout import BLOCK_SIZE, CacheFormat
from models.causal_lm import CausalLM, load_model
from models.config import ModelConfig, load_model_config
from models.parallel import ParallelContext
from tests.engine.plan_driver import Driver

WORLDS = {"deepseek_v3.1": ("dp=8,tp=1", "dp=4,tp=2", "dp=1,tp=8"), "kimi_k2": ("dp=16,tp=1",), "longcat_flash": ("dp=8,tp=1",)}
CONTEXTS = (32768, 131072, 65536, 16384)  # most wanted first
GIVEN_CONTEXT = 32768  # where it is asked for, the given batches are measured there alone
FORMATS = ("fp8", "bf16")
WARM_STEPS, WINDOWS, WINDOW_STEPS, PROFILED_STEPS = 5, 3, 5, 3
KERNELS_KEPT = 40  # of a step's kernels, by time
HEADROOM = 2 * BLOCK_SIZE  # tokens by which a sequence grows in all of these steps; it ends at its context
RESERVED_BYTES = 4 << 30  # for graphs, workspaces and the copies that timing the parts makes
METHOD = (
    "hand-made plans on ModelRunner, random cache, greedy sampling, one step ahead; median of "
    f"{WINDOWS} windows of {WINDOW_STEPS} steps after {WARM_STEPS}; parts as graph replays of their recorded calls"
)


@dataclass(frozen=True)
class Case:
    """batch: sequences of each replica; kind: what that number is, words of given, equal and largest"""

    fmt: CacheFormat
    context: int
    batch: int
    kind: str


class Rank:
    """A loaded model and the room for its cache."""

    def __init__(self, config: EngineConfig, device: torch.device, cache_bytes: int) -> None:
        """cache_bytes: 0 takes what is free on the device, less RESERVED_BYTES."""
        self.config, self.device = config, device
        self.parallel: ParallelContext = create_context(config, device)
        # Communicators take their memory when they are first used: before what is free gets measured.
        for used in (self.parallel.tp_all_reduce, self.parallel.tp_all_gather, self.parallel.tp_broadcast):
            used(torch.zeros(1, device=device))
        self.parallel.ep_reduce_scatter(self.parallel.ep_all_gather(torch.zeros(1, device=device)))
        self.model_config: ModelConfig = load_model_config(Path(config.model))
        began = time.perf_counter()
        self.model: CausalLM = load_model(
            Path(config.model),
            self.model_config,
            self.parallel,
            device=device,
            dtype=resolve_dtype(config, device),
            load_format=config.load_format,
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            cache_bytes = cache_bytes or torch.cuda.mem_get_info(device)[0] - RESERVED_BYTES
        self.load_seconds = time.perf_counter() - began
        self.weight_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        self.cache_bytes = least_of_all_ranks(cache_bytes, self.parallel, device)

    def largest_batch(self, fmt: CacheFormat, context: int) -> int:
        """Sequences of `context` tokens that the cache holds beside its null block."""
        blocks = self.cache_bytes // (BLOCK_SIZE * bytes_per_token(self.model_config, fmt)) - 1
        return max(0, blocks) // -(-context // BLOCK_SIZE)

    def cases(self, contexts: Sequence[int], batches: Sequence[int], most: int) -> Iterator[Case]:
        """Formats outermost, since each has its own cache. most: batches are cut to it."""
        for fmt in map(CacheFormat, FORMATS):
            for context in contexts:
                largest = min(most, self.largest_batch(fmt, context))
                given = batches if context == GIVEN_CONTEXT or GIVEN_CONTEXT not in contexts else ()
                kinds: dict[int, list[str]] = {batch: ["given"] for batch in given if batch <= largest}
                kinds.setdefault(min(most, self.largest_batch(CacheFormat.BF16, context)), []).append("equal")
                kinds.setdefault(largest, []).append("largest")
                yield from (Case(fmt, context, batch, " ".join(names)) for batch, names in kinds.items() if batch)


def least_of_all_ranks(value: int, parallel: ParallelContext, device: torch.device) -> int:
    return int(parallel.ep_all_gather(torch.tensor([value], device=device)).min())


@dataclass(frozen=True)
class Finished:
    """A step whose result was read. at: when, on the host's clock; device: seconds between its events; host: seconds that
    enqueueing the next step took; ran_dry: whether the device had finished before that was done, and so waited for the host"""

    at: float
    device: float
    host: float
    ran_dry: bool


class Steps:
    """Decode steps of one case."""

    def __init__(self, rank: Rank, cache: KVCache, case: Case) -> None:
        self.runner = ModelRunner(
            rank.model, rank.model_config, cache, rank.parallel, max_num_seqs=case.batch, max_model_len=case.context, device=rank.device
        )  # fmt: skip
        self.driver = Driver(self.runner)
        self.rows = range(case.batch)
        for row in self.rows:
            self.driver.start(row, case.context - HEADROOM)
            self.driver.computed[row] = case.context - HEADROOM
        # The first step brings every block of the contexts, and the token that nobody sampled.
        self.driver.run([self.driver.step_of(row, [1]) for row in self.rows]).wait()

    def enqueue(self) -> PendingStep:
        """The next step of all sequences."""
        return self.driver.run([self.driver.step_of(row) for row in self.rows])

    def run(self, count: int) -> list[Finished]:
        """`count` steps, each submitted before the last one's result is read, as the engine does."""
        finished: list[Finished] = []
        pending: PendingStep | None = None
        for index in range(count + 1):
            began, following = time.perf_counter(), self.enqueue() if index < count else None
            host, ran_dry = time.perf_counter() - began, pending is not None and pending.done
            if pending is not None:
                device = pending.wait().model_seconds
                finished.append(Finished(time.perf_counter(), device, host, ran_dry and following is not None))
            pending = following
        return finished


def measure(rank: Rank, cache: KVCache, case: Case, ceilings: Ceilings) -> dict[str, Any]:
    """The fields of a case's line."""
    steps, cuda = Steps(rank, cache, case), rank.device.type == "cuda"
    recorder = Recorder()
    with recorder.recording(rank.parallel):
        steps.run(1)
    capture_seconds = steps.runner.capture_graphs(show_progress=False, sizes=[case.batch]) if cuda else 0.0
    warm, windows, length = (WARM_STEPS, WINDOWS, WINDOW_STEPS) if cuda else (1, 1, 1)
    # The device never pauses between windows; no step follows the last one, so that one does not count.
    counted = steps.run(warm + windows * length + 1)[warm - 1 : -1]
    window_us = [1e6 * (counted[i + length].at - counted[i].at) / length for i in range(0, windows * length, length)]
    step_us = statistics.median(window_us)
    with torch.inference_mode():
        operations = break_down(recorder.calls, ceilings, case.fmt, rank.device)
    parts = parts_of(operations)
    roofline_us = sum(part["roofline_us"] for part in parts.values())
    return {
        "step_us": step_us,
        "window_us": window_us,
        "tokens_per_s_per_gpu": 1e6 * case.batch / rank.parallel.tp / step_us,
        "roofline_us": roofline_us,
        "roofline_share": roofline_us / step_us,
        "host_us": 1e6 * statistics.median(step.host for step in counted),
        "host_gap_events": max(0.0, 1.0 - sum(step.device for step in counted[1:]) / (counted[-1].at - counted[0].at)),
        "dry_steps": sum(step.ran_dry for step in counted[1:]),
        **(profiled(steps) if cuda else {}),
        "parts": parts,
        "operations": [asdict(operation) | {"roofline_us": operation.roofline_us} for operation in operations],
        "collectives_share": parts.get("collectives", {"us": 0.0})["us"] / step_us,
        "capture_seconds": capture_seconds,
    }


def profiled(steps: Steps) -> dict[str, Any]:
    """What a CUDA device does in a step, kernel by kernel."""
    timeline = profile(lambda: steps.run(PROFILED_STEPS), PROFILED_STEPS)
    return {
        "host_gap": 1.0 - timeline.busy_us / timeline.us,
        "busy_us": timeline.busy_us,
        "profiled_us": timeline.us,
        "kernels": [(name, us, launches, component_of(name)) for name, us, launches in timeline.kernels[:KERNELS_KEPT]],
    }


def ratios(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """FP8 cache over BF16 cache at each context of one world, from the lines of its cases."""
    for context in sorted({line["context"] for line in lines}):
        found = {(line["format"], kind): line for line in lines if line["context"] == context for kind in line["kind"].split()}
        fp8, bf16 = (found.get((fmt, "equal")) for fmt in FORMATS)
        most_fp8, most_bf16 = (found.get((fmt, "largest")) for fmt in FORMATS)
        if not (fp8 and bf16 and most_fp8 and most_bf16):
            continue
        reachable = [line["batch"] / line["roofline_us"] for line in (most_fp8, most_bf16)]
        yield {
            "context": context,
            "equal_batch": fp8["batch"],
            "attention_ratio": bf16["parts"]["attention"]["us"] / fp8["parts"]["attention"]["us"],
            "attention_step_ratio": _in_step(bf16, "attention") / _in_step(fp8, "attention"),
            "step_ratio": bf16["step_us"] / fp8["step_us"],
            "largest_batches": [most_fp8["batch"], most_bf16["batch"]],
            "tokens_ratio": most_fp8["tokens_per_s_per_gpu"] / most_bf16["tokens_per_s_per_gpu"],
            "roofline_ratio": reachable[0] / reachable[1],
        }


def _in_step(line: dict[str, Any], part: str) -> float:
    """Microseconds of a part's kernels in the profiled step; nan without a profile, as on a CPU."""
    return sum(us for _, us, _, of in line.get("kernels", ()) if of == part) or float("nan")


def run_world(rank: Rank, records: Records, args: argparse.Namespace, ceilings: Ceilings) -> None:
    """All cases of one loaded model, then its ratios."""
    parallel, cache = rank.parallel, None
    simulated = rank.config.simulated is not None
    world = {"shape": Path(rank.config.model).name, "dp": parallel.dp, "tp": parallel.tp, "simulated": simulated}
    now = {"device": records.state["device"], "git": records.state["git"]}
    name = f"{'SIMULATED rank of ' if simulated else ''}{world['shape']} dp{parallel.dp} tp{parallel.tp}"
    for case in rank.cases(args.contexts, args.batches, args.most):
        key = world | {
            "figure": "decode",
            "format": case.fmt.value,
            "context": case.context,
            "kind": case.kind,
            "batch": case.batch,
        }
        failed = key | {"figure": "decode_failed"}
        if records.has(**key, **now) or records.has(**failed, **now):
            continue
        began = time.perf_counter()
        try:
            if cache is None or cache.format is not case.fmt:
                cache = None
                free_memory(rank.device)
                cache = random_cache(rank, case.fmt)
            found = measure(rank, cache, case, ceilings)
        except Exception as error:
            records.write(**failed, error=f"{type(error).__name__}: {error}"[:2000])
            if parallel.has_peers:
                raise
            print(f"{name} {case.fmt.value} {case.context} x {case.batch}: FAILED {error}", flush=True)
            continue
        finally:
            free_memory(rank.device)
        if parallel.rank == 0:
            records.write(
                **key, **found, read_rate=ceilings.read, bf16_matmul_rate=ceilings.matmul,
                cache_bytes=rank.cache_bytes, weight_bytes=rank.weight_bytes, load_seconds=rank.load_seconds,
                case_seconds=time.perf_counter() - began,
            )  # fmt: skip
            parts = "  ".join(f"{part} {sums['us'] / 1e3:.2f}" for part, sums in found["parts"].items())
            gaps = " / ".join(
                f"{gap:.3f}" for label in ("host_gap", "host_gap_events") if (gap := found.get(label)) is not None
            )
            print(
                f"{name} {case.fmt.value} {case.context} x {case.batch} ({case.kind}): {found['step_us'] / 1e3:.2f} ms, "
                f"{found['tokens_per_s_per_gpu']:.0f} tokens/s/GPU, roofline {found['roofline_share']:.2f}, gap {gaps} | ms alone: {parts}",
                flush=True,
            )
    if parallel.rank == 0:
        for line in ratios(records.find(**world, figure="decode", **now)):
            records.write(figure="decode_ratios", **world, **line)
            print(
                f"{name} {line['context']}: FP8 over BF16 cache: attention {line['attention_ratio']:.2f}x alone, {line['attention_step_ratio']:.2f}x in the step at batch {line['equal_batch']}; "
                f"tokens/s {line['tokens_ratio']:.2f}x at the largest batches {line['largest_batches']}, rooflines {line['roofline_ratio']:.2f}x",
                flush=True,
            )


def random_cache(rank: Rank, fmt: CacheFormat) -> KVCache:
    blocks = rank.cache_bytes // (BLOCK_SIZE * bytes_per_token(rank.model_config, fmt)) - 1
    cache = KVCache.allocate(rank.model_config, fmt, blocks, rank.device)
    for layer in cache.layers:
        fill_random(layer)
    return cache


def free_memory(device: torch.device) -> None:
    """Give back what dead objects hold, also to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", default=list(WORLDS), help="names under benchmarks/shapes, or folders with a config.json"
    )
    parser.add_argument("--worlds", nargs="+", metavar="dp=N,tp=N", help="deployments (default: those of each shape)")
    parser.add_argument(
        "--real", action="store_true", help="under torchrun: this process is one of the ranks, nothing is simulated"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--batches", type=int, nargs="*", default=[16, 24], help="beside the equal and the largest ones")
    parser.add_argument("--most", type=int, default=256, metavar="N", help="largest batch (default: 256)")
    parser.add_argument("--cache-memory-bytes", type=int, default=0, metavar="N", help="0: what is free")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--quick", action="store_true", help="DeepSeek-V3.1 DP8 at 32k, 64k and 128k: about a minute on an H200"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "decode.jsonl")
    args = parser.parse_args(argv)
    if args.quick:
        args.shapes, args.worlds, args.contexts, args.batches = (
            ["deepseek_v3.1"],
            ["dp=8,tp=1"],
            [32768, 65536, 131072],
            [16, 24],
        )
    torch.manual_seed(0)
    device = resolve_device(EngineConfig("any", device=args.device))
    if args.real:
        device = choose_device(args.device, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        torch.manual_seed(dist.get_rank())  # with equal caches all replicas' sequences would choose the same experts
    if args.cache_memory_bytes == 0 and device.type == "cpu":
        parser.error("--cache-memory-bytes: needed on a CPU, whose free memory belongs to everybody")
    ceilings = Ceilings.measure(device)
    free_memory(device)
    records = Records(args.output, device=device.type, method=METHOD, seed=0)
    for shape in args.shapes:
        folder = SHAPES / shape if (SHAPES / shape).is_dir() else Path(shape)
        for world in args.worlds or WORLDS[folder.name]:
            config = engine_config(folder, world, args.real)
            rank = Rank(config, device, args.cache_memory_bytes)
            if rank.parallel.rank == 0:
                print(
                    f"{folder.name} {world}: loaded in {rank.load_seconds:.1f} s, cache {rank.cache_bytes / 1e9:.1f} GB",
                    flush=True,
                )
            run_world(rank, records, args, ceilings)
            del rank
            free_memory(device)
    if args.real:
        dist.destroy_process_group()


def engine_config(folder: Path, world: str, real: bool) -> EngineConfig:
    """One simulated rank of `world`, or that world itself."""
    simulated = EngineConfig(str(folder), load_format="dummy", simulate_world=world)
    if not real:
        return simulated
    assert simulated.simulated is not None
    return EngineConfig(
        str(folder), load_format="dummy", parallel=ParallelConfig(simulated.simulated.dp, simulated.simulated.tp)
    )


if __name__ == "__main__":
    main()
