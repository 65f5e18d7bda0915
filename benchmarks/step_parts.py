"""What a decode step is made of: every operation's calls are recorded in one eager step, then timed again, one by one.

An operation (`linear` counts once per shape of weight) is replayed as one CUDA graph of its calls of all layers in their
order, so that each layer's weights and cache come from memory as they do in a step. Beside the time stands the roofline: the
larger of bytes / read rate and FLOPs / matmul rate. A part is the sum of its operations.

The profiler tells which kernels ran in a step and when; `component_of` names the part that a kernel belongs to.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
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
    "attention": ("decode_lines", "plan_decode", "append_kv", "quantize_q", "mla_decode"),
    "linears": ("linear", "gated_mlp", "absorb_query", "project_values", "bmm", "mm"),
    "experts": ("router_logits", "route", "choose_experts", "quantize_activation", "grouped_mlp"),
    "norms": ("rms_norm", "rms_norm_quantized"),
    "collectives": ("tp_all_reduce", "tp_all_gather", "tp_broadcast", "ep_all_gather", "ep_reduce_scatter", "turned"),
    "sampling": ("choose_tokens", "draft_tokens", "accept_tokens"),
}
KERNELS = (  # part -> the start of its kernels' names; the first match counts
    ("attention", r"mla_decode|combine_decode|plan_decode|decode_lines|quantize_q_|append_|fetch_dequant"),
    ("experts", r"route|sort_pairs|count_parts|place_parts|scatter_|gate_|combine_experts|sum_experts|stream_|grouped_"),
    ("norms", r"rms_norm|norm_"),
    (
        "linears",
        r"absorb_query|project_values|product_|finish_|quantize_|silu_mul|nvjet|cutlass|sm90_|gemm|gemv|void cutlass|void gemm|splitk|cublas",
    ),
    ("sampling", r"choose_|accept_tokens"),
    ("collectives", r"nccl"),
)
SLEEP_CYCLES = 40_000_000  # about 20 ms, in which the host enqueues the first profiled step
WARM, MEASURED = 3, 5  # replays; the same on all ranks, whose collectives must pair up


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
    """One recorded call, its work included: bytes that must move and FLOPs, without regard to caches.

    name: of the function; label: the name, with the weight's sizes where one function serves several weights
    """

    name: str
    label: str
    run: Callable[[], object]
    bytes: int
    flops: int


@dataclass(frozen=True)
class Operation:
    """All calls of one label in a step. us: their time alone; read_us, math_us: what their bytes and FLOPs take at least."""

    name: str
    part: str
    calls: int
    us: float
    read_us: float
    math_us: float
    bytes: int
    flops: int

    @property
    def roofline_us(self) -> float:
        return max(self.read_us, self.math_us)


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
            alone = name.startswith("tp_") and args[0].tp == 1  # a collective of one rank, which does nothing
            if self._inside or alone:
                return original(*args, **kwargs)
            self._inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            moved, flops = _work(name, args, kwargs, result)
            self.calls.append(Call(name, _label(name, args), lambda: original(*args, **kwargs), moved, flops))
            return result

        return call


def _bytes(*values: Any) -> int:
    """Of all tensors in `values`, also inside tuples and the layouts of kernels/layout.py."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)):
            total += _bytes(*value)
        elif is_dataclass(value):
            total += _bytes(*(getattr(value, item.name) for item in fields(value)))
    return total


def _read(rows: Any) -> Any:
    """What a product reads of its rows: where they come quantized, not the plain ones beside them."""
    return getattr(rows, "quantized", rows)


def _num_rows(rows: Any) -> int:
    data = rows if isinstance(rows, torch.Tensor) else rows.quantized.data
    return data.shape[:-1].numel()


def _size(weight: torch.Tensor | BlockScaledWeight) -> torch.Size:
    return weight.data.shape if isinstance(weight, BlockScaledWeight) else weight.shape


def _label(name: str, args: tuple[Any, ...]) -> str:
    match name:
        case "linear" | "gated_mlp":
            rows, columns = _size(args[1])
            return f"{name} {columns} to {rows if name == 'linear' else rows // 2}"
        case "bmm" | "mm":
            return f"{name} {args[1].shape[-2]} to {args[1].shape[-1]}"
    return name


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
            return _bytes(_read(x), weight, result), 2 * _num_rows(x) * _size(weight).numel()
        case "gated_mlp":
            return _bytes(_read(args[0]), *args[1:], result), 2 * _num_rows(args[0]) * sum(_size(w).numel() for w in args[1:])
        case "grouped_mlp":
            x, _, ids, gate_up, down = args
            count = _size(gate_up)[0]
            local = ids[(ids >= kwargs["first_expert"]) & (ids < kwargs["first_expert"] + count)]
            touched, pairs = local.unique().numel(), local.numel()
            weights = _bytes(gate_up, down) // count * touched
            return weights + _bytes(_read(x), result), 2 * pairs * (_size(gate_up)[1:].numel() + _size(down)[1:].numel())
        case "bmm" | "mm":
            return _bytes(*args, result), 2 * args[0].numel() * args[1].shape[-1]
        case "absorb_query" | "project_values":
            rows, weight = args[:2]
            return _bytes(rows, weight, result), 2 * rows.shape[0] * weight.numel()
        case "choose_experts":
            return _bytes(args, result), 2 * args[0].shape[0] * args[1].numel()
        case "route" | "rms_norm" | "rms_norm_quantized" | "quantize_activation":
            return _bytes(args, list(kwargs.values()), result), 0
        case "choose_tokens" | "draft_tokens":
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


def break_down(calls: list[Call], ceilings: Ceilings, fmt: CacheFormat, device: torch.device) -> list[Operation]:
    """The step's operations, part by part. Attention in BF16 has the BF16 matmul rate, all else FP8's."""
    found = []
    for part, names in PARTS.items():
        labels = list(dict.fromkeys(call.label for name in names for call in calls if call.name == name))
        exact = part == "attention" and fmt is not CacheFormat.FP8
        rate = ceilings.matmul * (1.0 if exact else FP8_OVER_BF16)
        for label in labels:
            chosen = [call for call in calls if call.label == label]
            moved, flops = sum(call.bytes for call in chosen), sum(call.flops for call in chosen)
            us = replay_us([call.run for call in chosen], device)
            times = 1e6 * moved / ceilings.read, 1e6 * flops / rate
            found.append(Operation(label, part, len(chosen), us, *times, moved, flops))
    return found


def parts_of(operations: list[Operation]) -> dict[str, dict[str, float]]:
    """Sums over each part's operations; roofline_us is the larger of the summed bytes' time and the summed FLOPs' time, which
    is never more than the sum of the operations' rooflines."""
    found: dict[str, dict[str, float]] = {}
    for name in PARTS:
        if chosen := [operation for operation in operations if operation.part == name]:
            sums = {key: sum(getattr(o, key) for o in chosen) for key in ("calls", "us", "bytes", "flops")}
            found[name] = sums | {"roofline_us": max(sum(o.read_us for o in chosen), sum(o.math_us for o in chosen))}
    return found


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device, in microseconds of one clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a device did in a few steps. us: a step, from the first kernel of the first to the last one of the last;
    busy_us: of it, with some kernel running; kernels: (name, us, launches) of a step, the times adding up to busy_us.

    Kernels overlap: most are launched early and wait inside for the one before. So a kernel's time begins when the one that
    ran already has ended.
    """

    us: float
    busy_us: float
    kernels: list[tuple[str, float, float]]

    @staticmethod
    def of(spans: list[Span], steps: int) -> Timeline:
        """Raises RuntimeError without spans: a step without a kernel is a profiler that saw nothing."""
        if not spans:
            raise RuntimeError("the profiler saw no kernel: is CUPTI there, and does another profiler hold it?")
        sums: dict[str, tuple[float, int]] = {}
        spans = sorted(spans, key=lambda span: (span.begin, span.end))
        busy, reached = 0.0, spans[0].begin
        for span in spans:
            own = max(0.0, span.end - max(span.begin, reached))
            busy, reached = busy + own, max(reached, span.end)
            us, count = sums.get(span.name, (0.0, 0))
            sums[span.name] = (us + own, count + 1)
        ranked = sorted(((name, us / steps, count / steps) for name, (us, count) in sums.items()), key=lambda item: -item[1])
        return Timeline((reached - spans[0].begin) / steps, busy / steps, ranked)


def profile(run: Callable[[], object], steps: int) -> Timeline:
    """What a CUDA device does while `run` makes `steps` steps, the host ahead from the first one on, as in the middle of a
    longer run. Kernels of replayed graphs are seen one by one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        torch.cuda._sleep(SLEEP_CYCLES)
        run()
        torch.cuda.synchronize()
    spans = spans_on(profiler.events(), torch.autograd.DeviceType.CUDA)
    return Timeline.of([span for span in spans if "spin_kernel" not in span.name], steps)


def spans_on(events: Iterable[Any], device: torch.autograd.DeviceType) -> list[Span]:
    """The profiler's events of one kind of device. Its enum makes a new object at every read: values compare, identities never."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == device and not getattr(event, "is_user_annotation", False)  # torch 2.11 may not say
    ]


def component_of(kernel: str) -> str:
    """The part a kernel's time belongs to; "other" for torch's copies, fills and index operations, and for sampling."""
    return next((part for part, pattern in KERNELS if re.match(pattern, kernel)), "other")
