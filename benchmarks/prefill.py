"""Time to the first token of one prompt on an idle engine: `python -m benchmarks.prefill [--models demo deepseek_v3.1]`.

Prompts of random tokens, computed in chunks of the default budget (8,192 tokens), go through the whole engine: scheduler,
chunks, context pieces fetched from the FP8 cache and expanded, sampling. The first prompt of a length warms up; then the
median of the others counts. Published shapes run as one simulated rank with dummy weights: the rank's own prompt, and the
experts' load of all ranks' prompts, every rank bringing as many tokens; what would travel between ranks is copied instead.

One more prompt tells where the time goes: device events stand around every operation, and what lies between operations
(copies, sums, gaps) is "other". The roofline of an operation is its FLOPs over the rate of a large matrix product of this
run, BF16, or 17/9 of it where both operands are FP8; bytes do not bound prompts. A prompt's roofline is the sum.

One JSON line a case in results/prefill.jsonl; a case that is there, for this device and revision, is skipped.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RESULTS, Records
from benchmarks.step_parts import FP8_OVER_BF16, Ceilings
from benchmarks.workloads import SHAPES
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.llm import build_core
from engine.messages import AddRequest, TokenOutput
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.layout import BLOCK_SIZE, BlockScaledWeight, Rows, Weight
from models.parallel import ParallelContext, SimulatedContext

WORLDS = {"deepseek_v3.1": "dp=8,tp=1", "kimi_k2": "dp=16,tp=1", "longcat_flash": "dp=8,tp=1"}
LENGTHS = (1024, 8192, 32768)
METHOD = "one prompt at a time through the engine, median after one warm-up; parts by device events in one more prompt"
PARTS = {
    "attention": ("append_kv", "rope", "join_heads", "fetch_dequant", "prefill_attention", "merge_attention"),
    "linears": ("linear", "gated_mlp"),
    "experts": ("choose_experts", "quantize_activation", "grouped_mlp"),
    "norms": ("rms_norm", "rms_norm_quantized"),
    "exchange": ("ep_all_gather", "ep_reduce_scatter", "turned"),
}


@dataclass(frozen=True)
class Call:
    """One call of an operation. flops: evaluated when the prompt is done, since it may read what is on the device."""

    part: str
    label: str
    begin: Any
    end: Any
    flops: Callable[[], int]
    fp8: bool


@dataclass
class Stopwatch:
    """Times the operations of a prompt, outermost only, by events of the device's stream; on a CPU by its clock."""

    device: torch.device
    calls: list[Call] = field(default_factory=list)
    _inside: bool = False

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return end - begin if self.device.type != "cuda" else begin.elapsed_time(end) / 1e3

    @contextmanager
    def running(self) -> Iterator[None]:
        owners: list[Any] = [ops, ParallelContext, SimulatedContext]
        kept = [
            (owner, part, name, vars(owner)[name])
            for part, names in PARTS.items()
            for name in names
            for owner in owners
            if name in vars(owner)
        ]
        for owner, part, name, original in kept:
            setattr(owner, name, self._timed(part, name, original))
        try:
            yield
        finally:
            for owner, _, name, original in kept:
                setattr(owner, name, original)

    def _timed(self, part: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside, begin = True, self.now()
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            self.calls.append(Call(part, _label(name, args), begin, self.now(), *_work(name, args, kwargs)))
            return result

        return call

    def lines(self, matmul: float) -> list[dict[str, Any]]:
        """Sums of every label, in order of first calls. matmul: BF16 FLOPs per second."""
        found: dict[str, dict[str, Any]] = {}
        for call in self.calls:
            line = found.setdefault(
                call.label,
                {"name": call.label, "part": call.part, "calls": 0, "seconds": 0.0, "flops": 0, "roofline_seconds": 0.0},
            )
            flops = call.flops()
            line["calls"] += 1
            line["seconds"] += self.seconds(call.begin, call.end)
            line["flops"] += flops
            line["roofline_seconds"] += flops / (matmul * (FP8_OVER_BF16 if call.fp8 else 1.0))
        return list(found.values())


def _size(weight: Weight) -> torch.Size:
    return weight.data.shape if isinstance(weight, BlockScaledWeight) else weight.shape


def _num_rows(rows: Rows) -> int:
    data = rows if isinstance(rows, torch.Tensor) else rows.quantized.data
    return data.shape[:-1].numel()


def _label(name: str, args: tuple[Any, ...]) -> str:
    if name not in ("linear", "gated_mlp"):
        return name
    rows, columns = _size(args[1])
    return f"{name} {columns} to {rows if name == 'linear' else rows // 2}"


def _work(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[[], int], bool]:
    """(FLOPs of a call, whether both operands of its products are FP8)."""
    match name:
        case "linear" | "gated_mlp" | "choose_experts":
            weights = args[1:2] if name == "choose_experts" else args[1:]
            flops = 2 * _num_rows(args[0]) * sum(_size(weight).numel() for weight in weights)
            return (lambda: flops), isinstance(weights[0], BlockScaledWeight)
        case "grouped_mlp":
            ids, gate_up, down = args[2:5]
            first, each = kwargs["first_expert"], _size(gate_up)[1:].numel() + _size(down)[1:].numel()
            end = first + _size(gate_up)[0]
            return (lambda: 2 * each * int(((ids >= first) & (ids < end)).sum())), isinstance(gate_up, BlockScaledWeight)
        case "prefill_attention":
            q, k, v = args[:3]
            flops = attention_flops(kwargs["lens_q"], kwargs["lens_k"], kwargs["causal"], q.shape[1], k.shape[2] + v.shape[2])
            return (lambda: flops), False
    return (lambda: 0), False


def attention_flops(lens_q: list[int], lens_k: list[int], causal: bool, heads: int, dims: int) -> int:
    """A causal square needs the pairs on and below its diagonal."""
    pairs = sum(q * (q + 1) // 2 if causal else q * k for q, k in zip(lens_q, lens_k, strict=True))
    return 2 * heads * pairs * dims


def first_token_seconds(core: EngineCore, name: str, ids: list[int]) -> float:
    """From handing over the prompt to holding its first token."""
    start = time.perf_counter()
    core.add(AddRequest(name, ids, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), 0.0, []))
    while not any(isinstance(output, TokenOutput) and output.token_ids for output in core.step()):
        pass
    seconds = time.perf_counter() - start
    while core.has_work:
        core.step()
    return seconds


def measure(core: EngineCore, vocab: int, length: int, repeats: int, device: torch.device, matmul: float) -> dict[str, Any]:
    """The fields of a line. matmul: BF16 FLOPs per second of a large matrix product."""
    generator = torch.Generator().manual_seed(length)
    warm, timed, *others = torch.randint(2, vocab, (2 + repeats, length), generator=generator).tolist()
    first_token_seconds(core, f"{length}-warm", warm)
    seconds = statistics.median(first_token_seconds(core, f"{length}-{i}", ids) for i, ids in enumerate(others))
    stopwatch = Stopwatch(device)
    with stopwatch.running():
        begin = stopwatch.now()
        first_token_seconds(core, f"{length}-timed", timed)
        end = stopwatch.now()
    if device.type == "cuda":
        torch.cuda.synchronize()
    operations = stopwatch.lines(matmul)
    roofline = sum(line["roofline_seconds"] for line in operations)
    return {
        "first_token_seconds": seconds,
        "tokens_per_s": length / seconds,
        "repeats": repeats,
        "roofline_seconds": roofline,
        "roofline_share": roofline / seconds,
        "timed_seconds": stopwatch.seconds(begin, end),
        "bf16_matmul_rate": matmul,
        "operations": operations,
    }


def breakdown(found: dict[str, Any]) -> str:
    """A table of a line's operations, the largest first."""
    lines = sorted(found["operations"], key=lambda line: -line["seconds"])
    whole = found["timed_seconds"]
    other = whole - sum(line["seconds"] for line in lines)
    text = [
        f"  {line['name']:<26} {line['calls']:>5} x {1e3 * line['seconds']:9.2f} ms {100 * line['seconds'] / whole:5.1f} %"
        f" {line['flops'] / line['seconds'] / 1e12:7.0f} TFLOP/s {line['roofline_seconds'] / line['seconds']:5.2f} of its roofline"
        for line in lines
    ]
    return "\n".join([*text, f"  {'other':<26} {'':>7} {1e3 * other:9.2f} ms {100 * other / whole:5.1f} %"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["demo", "deepseek_v3.1"], help="demo, names under benchmarks/shapes, or folders"
    )
    parser.add_argument("--world", metavar="dp=N,tp=N", help="deployment whose rank is simulated (default: each shape's own)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--chunk", type=int, default=SchedulerConfig().max_num_batched_tokens, help="prompt tokens of a step")
    parser.add_argument("--repeats", type=int, default=3, help="prompts that count; 1 from 16k tokens on")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output", type=Path, default=RESULTS / "prefill.jsonl")
    args = parser.parse_args(argv)
    records: Records | None = None
    for model in args.models:
        folder = SHAPES / model if (SHAPES / model).is_dir() else Path(model)
        world = args.world if args.world is not None else WORLDS.get(folder.name, "")
        core, info = build_core(
            EngineConfig(
                model if model == "demo" else str(folder),
                device=args.device,
                load_format="dummy" if world else "auto",
                simulate_world=world,
                num_cache_blocks=2 * -(-max(args.lengths) // BLOCK_SIZE) + 2,
                prefix_cache=False,
                cuda_graphs=False,
                scheduler=SchedulerConfig(max_num_batched_tokens=args.chunk, max_num_seqs=2),
            )
        )
        device = torch.device(info.device)
        records = records or Records(args.output, device=device.type, method=METHOD, seed=0)
        matmul = Ceilings.measure(device).matmul
        for length in sorted(min(length, info.max_model_len - BLOCK_SIZE) for length in args.lengths):
            key = {"figure": "prefill", "model": folder.name, "world": world, "tokens": length, "chunk": args.chunk}
            if records.has(**key, device=records.state["device"], git=records.state["git"]):
                continue
            found = measure(core, info.model_config.vocab_size, length, args.repeats if length < 16384 else 1, device, matmul)
            records.write(**key, cache_format=info.cache_format, **found)
            print(
                f"{'SIMULATED rank of ' if world else ''}{folder.name} {world} {length} tokens: first token after "
                f"{1e3 * found['first_token_seconds']:.1f} ms, {found['tokens_per_s']:.0f} tokens/s, "
                f"{found['roofline_share']:.2f} of the roofline\n{breakdown(found)}",
                flush=True,
            )
        del core
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
