"""What a decode step is made of: every operation's calls are recorded in one eager step, then timed again, class by class.

A class is replayed as one CUDA graph of its calls of all layers in their order, so that each layer's weights and cache come
from memory as they do in a step. Beside the time stands the roofline: the larger of bytes / read rate and FLOPs / matmul rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import engine.model_runner
from benchmarks import kernel_linear
from benchmarks.harness import matmul_rate
from kernels import ops
from kernels.layout import BlockScaledWeight, CacheFormat
from models.parallel import ParallelContext

FP8_OVER_BF16 = 17 / 9  # of the latent products' work, 512 + 512 of 576 + 512 dims run at twice the BF16 rate
PARTS = {
    "attention": ("plan_decode", "append_kv", "quantize_q", "mla_decode"),
    "linears": ("linear", "gated_mlp", "bmm", "mm"),
    "experts": ("router_logits", "route", "grouped_mlp"),
    "norms": ("rms_norm",),
    "collectives": ("tp_all_reduce", "tp_all_gather", "tp_broadcast", "ep_all_gather", "ep_reduce_scatter", "turned"),
    "sampling": ("sample",),
}
WARM, MEASURED = 12, 15  # replays; the same on all ranks, whose collectives must pair up


@dataclass(frozen=True)
class Ceilings:
    """Of one device, measured in this run: bytes per second of a kernel that only reads, FLOPs per second of a BF16 product."""

    read: float
    matmul: float

    @staticmethod
    def measure(device: torch.device) -> Ceilings:
        if device.type == "cuda":
            return Ceilings(kernel_linear.read_rate(), matmul_rate(torch.bfloat16) * 1e12)
        data, square = torch.ones(1 << 22), torch.ones(256, 256)
        read, product = (_host_seconds(f) for f in (data.sum, lambda: square @ square))
        return Ceilings(4 * data.numel() / read, 2 * 256**3 / product)


def _host_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(frozen=True)
class Call:
    """One recorded call, its work included: bytes that must move and FLOPs, without regard to caches."""

    name: str
    run: Callable[[], object]
    bytes: int
    flops: int


@dataclass
class Recorder:
    """Calls of the listed functions, outermost only, while `recording` is entered."""

    calls: list[Call] = field(default_factory=list)
    _inside: bool = False

    @contextmanager
    def recording(self, parallel: ParallelContext) -> Iterator[None]:
        names = {name for part in PARTS.values() for name in part}
        owners: list[Any] = [ops, torch, engine.model_runner, type(parallel)]
        found = [(owner, name) for owner in owners for name in sorted(names) if hasattr(owner, name)]
        # torch has functions of our operations' names (rms_norm), which are not what a layer calls
        kept = [(owner, name) for owner, name in found if owner is not torch or name in ("bmm", "mm")]
        originals = [(owner, name, getattr(owner, name)) for owner, name in kept]
        for owner, name, original in originals:
            setattr(owner, name, self._wrapped(name, original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            moved, flops = _work(name, args, kwargs, result)
            self.calls.append(Call(name, lambda: original(*args, **kwargs), moved, flops))
            return result

        return call


def _bytes(*values: Any) -> int:
    """Of all tensors in `values`, block scales and cached queries included."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)):
            total += _bytes(*value)
        elif isinstance(value, BlockScaledWeight):
            total += _bytes(value.data, value.scale)
    return total


def _size(weight: torch.Tensor | BlockScaledWeight) -> torch.Size:
    return weight.data.shape if isinstance(weight, BlockScaledWeight) else weight.shape


def _work(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """(bytes, FLOPs) of a call."""
    match name:
        case "mla_decode":
            query, cache, _, seq_lens = args[:4]
            tokens = int(seq_lens.sum())
            rows = query.content.shape[1] * query.content.shape[2]  # a sequence's query rows times heads
            moved = tokens * cache.format.bytes_per_token(cache.latent_dim, cache.rope_dim)
            moved += _bytes(query.content, query.rope, query.scale, result)
            return moved, 2 * rows * tokens * (2 * cache.latent_dim + cache.rope_dim)
        case "append_kv":
            return 2 * _bytes(*args[1:3]), 0
        case "quantize_q":
            return _bytes(*args[:2]) + _bytes(result.content, result.rope, result.scale), 0
        case "linear" | "router_logits":
            x, weight = args
            return _bytes(x, weight, result), 2 * x.shape[:-1].numel() * _size(weight).numel()
        case "gated_mlp":
            return _bytes(*args, result), 2 * args[0].shape[0] * sum(_size(weight).numel() for weight in args[1:])
        case "grouped_mlp":
            x, _, ids, gate_up, down = args
            count = _size(gate_up)[0]
            local = ids[(ids >= kwargs["first_expert"]) & (ids < kwargs["first_expert"] + count)]
            touched, pairs = local.unique().numel(), local.numel()
            weights = _bytes(gate_up, down) // count * touched
            return weights + _bytes(x, result), 2 * pairs * (_size(gate_up)[1:].numel() + _size(down)[1:].numel())
        case "bmm" | "mm":
            return _bytes(*args, result), 2 * args[0].numel() * args[1].shape[-1]
        case "route" | "rms_norm":
            return _bytes(args, list(kwargs.values()), result), 0
        case "sample":
            return _bytes(args[0], result), 0
    return 0, 0  # the plan is a few hundred bytes; what travels has no roofline of this device


def replay_us(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Microseconds of all calls in their order: median of replays of one graph; on a CPU of plain runs."""
    if device.type != "cuda":
        return 1e6 * _host_seconds(lambda: [call() for call in calls])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(WARM + MEASURED):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e3 * begin.elapsed_time(end))
    return statistics.median(samples[WARM:])


def break_down(calls: list[Call], ceilings: Ceilings, fmt: CacheFormat, device: torch.device) -> dict[str, dict[str, float]]:
    """Per part: calls, us alone, roofline_us, bytes, flops. Attention in BF16 has the BF16 matmul rate, all else FP8's."""
    found = {}
    for part, names in PARTS.items():
        chosen = [call for call in calls if call.name in names]
        if not chosen:
            continue
        moved, flops = sum(call.bytes for call in chosen), sum(call.flops for call in chosen)
        exact = part == "attention" and fmt is not CacheFormat.FP8
        rate = ceilings.matmul * (1.0 if exact else FP8_OVER_BF16)
        found[part] = {
            "calls": len(chosen),
            "us": replay_us([call.run for call in chosen], device),
            "roofline_us": 1e6 * max(moved / ceilings.read, flops / rate),
            "bytes": moved,
            "flops": flops,
        }
    return found


@dataclass(frozen=True)
class Timeline:
    """What a device did in a few steps. busy_us: per step, with some kernel running; kernels: (name, us, launches) per step."""

    busy_us: float
    kernels: list[tuple[str, float, float]]


def profile(step: Callable[[], object], steps: int) -> Timeline:
    """Run `step` `steps` times under the profiler of a CUDA device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    sums: dict[str, tuple[float, int]] = {}
    for event in profiler.events():
        if event.device_type is torch.autograd.DeviceType.CUDA:
            begin, end = event.time_range.start, event.time_range.end
            spans.append((begin, end))
            us, count = sums.get(event.name, (0.0, 0))
            sums[event.name] = (us + end - begin, count + 1)
    ranked = sorted(((name, us / steps, count / steps) for name, (us, count) in sums.items()), key=lambda item: -item[1])
    return Timeline(covered(spans) / steps, ranked)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
