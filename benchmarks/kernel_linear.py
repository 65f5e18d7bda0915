"""Weight-bound products on one GPU: `python -m benchmarks.kernel_linear`.

Times dense block-scaled FP8 layers and grouped expert MLPs of published models at decode batch sizes, beside the read rate
of the same device in the same run. Method: CUDA-graph replays of a chain of calls over copies of the weights that together
exceed the L2 cache many times, after 60 ms of the same graph; medians of nine replays. `operation` is ops.linear on BF16
rows, quantization included; `product` starts from quantized rows, as after a fused norm. Appends one JSON line a case to
results/kernel_linear.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.cuda import binding, gemm, moe
from kernels.cuda.absorbed import absorb_query, project_values
from kernels.cuda.elementwise import rms_norm, rms_norm_quantized, silu_and_mul
from kernels.cuda.latent import quantize_q
from kernels.layout import FP8, BlockScaledWeight, CacheFormat, Weight

RESULTS = Path(__file__).parent / "results" / "kernel_linear.jsonl"
WARM_SECONDS, REPLAYS, ROTATED_BYTES = 0.06, 9, 600 << 20
GOAL_SHARE, GOAL_EXTRA_US = 0.85, 3.0  # time <= bytes / (share of the read rate) + extra

DENSE = {  # name: (N, K) of DeepSeek-V3
    "q_a + kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o_proj": (7168, 16384),
    "dense gate_up": (36864, 7168),
    "dense down": (7168, 18432),
    "shared gate_up": (4096, 7168),
    "shared down": (7168, 2048),
}
EXPERTS = {  # name: (local experts, hidden, inner, choices, experts in all, tokens); all None: every local expert gets the same
    "DeepSeek-V3, 1 a expert": (32, 7168, 2048, 8, None, 4),
    "DeepSeek-V3, 2 a expert": (32, 7168, 2048, 8, None, 8),
    "DeepSeek-V3, 4 a expert": (32, 7168, 2048, 8, None, 16),
    "DeepSeek-V3 EP8, 8 tokens": (32, 7168, 2048, 8, 256, 8),
    "DeepSeek-V3 EP8, 128 tokens": (32, 7168, 2048, 8, 256, 128),
    "LongCat-Flash EP8, 128 tokens": (64, 6144, 2048, 12, 768, 128),
    "DeepSeek-V3 EP8, 4096 tokens": (32, 7168, 2048, 8, 256, 4096),
}


class _ReadArgs(binding.ctypes.Structure):
    _fields_ = (("data", c_void_p), ("chunks", c_int), ("_pad", c_int))


def graph_us(call: Callable[[int], object], calls: int) -> float:
    """Microseconds of one call in a graph of `calls` calls; the argument numbers the call."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def read_rate() -> float:
    """Bytes per second of a kernel that only reads: the ceiling of this device in its present state."""
    data = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    args = _ReadArgs(data.data_ptr(), data.numel() // 16384)
    kernel = binding.kernel("read_rate", "read_rate", data.device.index)
    sms = binding.sm_count(data.device.index)
    return data.numel() / (graph_us(lambda _: kernel.launch(sms, 32, args), 4) * 1e-6)


def machine_state() -> dict[str, object]:
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    answer = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
    return {
        "gpu": answer.stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def random_weight(*shape: int) -> BlockScaledWeight:
    data = torch.empty(shape, dtype=FP8, device="cuda")
    for part in data.view(-1, shape[-1]).split(1 << 14):
        part.copy_((torch.randn(part.shape, device="cuda") * 60).clamp(-448, 448))
    return BlockScaledWeight(data, torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), device="cuda") * 1e-3)


def dense_case(name: str, n: int, k: int, batch: list[int], rate: float) -> Iterator[dict[str, object]]:
    size = n * k + 4 * -(-n // 128) * -(-k // 128)
    first = random_weight(n, k)
    copies = max(2, min(64, -(-ROTATED_BYTES // size)))
    weights = [first] + [BlockScaledWeight(first.data.clone(), first.scale.clone()) for _ in range(copies - 1)]
    plain = [w.dequantize(torch.bfloat16) for w in weights[: max(2, copies // 2)]]
    calls, goal = max(8, copies), size / (GOAL_SHARE * rate) * 1e6 + GOAL_EXTRA_US
    for m in batch:
        yield _dense_batch({"case": name, "tokens": m, "bytes": size, "goal_us": goal}, weights, plain, calls, rate)


def _dense_batch(
    case: dict[str, object], weights: list[BlockScaledWeight], plain: list[torch.Tensor], calls: int, rate: float
) -> dict[str, object]:
    m, (n, k) = case["tokens"], weights[0].data.shape
    x = torch.randn(m, k, device="cuda").bfloat16()
    q = gemm.quantize_1x128(x)
    operation = graph_us(lambda i: gemm.linear(x, weights[i % len(weights)]), calls)
    product = graph_us(lambda i: gemm.linear_quantized(q, weights[i % len(weights)], torch.bfloat16), calls)
    scaled_mm = graph_us(lambda i: gemm.scaled_mm(q, weights[i % len(weights)]), calls)
    bf16 = graph_us(lambda i: F.linear(x, plain[i % len(plain)]), calls)
    share = case["bytes"] / rate * 1e6 / product
    print(
        f"{case['case']:<16} {n:>6} x {k:<6} M {m:>4}  operation {operation:7.2f}  product {product:7.2f}  goal {case['goal_us']:7.2f} "
        f"{'met' if product <= case['goal_us'] else '---'}  share {share:.2f}  scaled_mm {scaled_mm:7.2f}  bf16 {bf16:7.2f}",
        flush=True,
    )
    return case | {
        "operation_us": operation, "product_us": product, "torch_scaled_mm_us": scaled_mm, "torch_bf16_us": bf16,
        "share_of_read_rate": share,
    }  # fmt: skip


def expert_case(
    name: str, shape: tuple[int, int, int, int, int | None, int], rate: float, quantized: bool
) -> dict[str, object]:
    local, hidden, inner, top_k, total, tokens = shape
    gate_up: Weight = random_weight(local, 2 * inner, hidden)
    down: Weight = random_weight(local, hidden, inner)
    if not quantized:
        gate_up, down = gate_up.dequantize(torch.bfloat16), down.dequantize(torch.bfloat16)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    if total is None:
        ids = torch.arange(tokens * top_k, device="cuda").view(tokens, top_k).int() % local
    else:
        ids = torch.rand(tokens, total, device="cuda").topk(top_k, dim=-1).indices.int()
    weights = torch.rand(tokens, top_k, device="cuda")
    here = ids[ids < local]
    hit, pairs = len(here.unique()), here.numel()
    size = hit * 3 * inner * hidden * (1 if quantized else 2)
    us = graph_us(lambda _: moe.grouped_mlp(x, weights, ids, gate_up, down, first_expert=0), 4)
    result = {
        "case": name, "quantized": quantized, "tokens": tokens, "pairs": pairs, "experts_hit": hit, "bytes": size, "operation_us": us,
        "share_of_read_rate": size / rate * 1e6 / us, "tflops": 6 * pairs * inner * hidden / us * 1e-6,
    }  # fmt: skip
    print(
        f"{name:<30} {'fp8 ' if quantized else 'bf16'} pairs {pairs:>5} experts {hit:>3}  {us:8.1f} us  "
        f"share {result['share_of_read_rate']:.2f}  {result['tflops']:6.1f} TFLOP/s",
        flush=True,
    )
    return result


def mlp_case(name: str, hidden: int, inner: int, m: int, rate: float) -> dict[str, object]:
    """A shared expert or dense MLP as one operation and as its three."""
    gate_up, down = random_weight(2 * inner, hidden), random_weight(hidden, inner)
    copies = max(2, -(-ROTATED_BYTES // (3 * inner * hidden)))
    weights = [tuple(BlockScaledWeight(w.data.clone(), w.scale.clone()) for w in (gate_up, down)) for _ in range(copies)]
    x = torch.randn(m, hidden, device="cuda").bfloat16()

    def three(i: int) -> torch.Tensor:
        first, second = weights[i % copies]
        return gemm.linear(silu_and_mul(gemm.linear(x, first)), second)

    result = {
        "case": name, "tokens": m, "bytes": 3 * inner * hidden,
        "operation_us": graph_us(lambda i: moe.gated_mlp(x, *weights[i % copies]), copies),
        "three_operations_us": graph_us(three, copies),
        "bytes_at_read_rate_us": 3 * inner * hidden / rate * 1e6,
    }  # fmt: skip
    print({key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}, flush=True)
    return result


def small_kernels(tokens: int) -> dict[str, object]:
    """Microseconds of the kernels around the products of a DeepSeek-V3 layer, weights from the L2 cache."""
    x, gate_up = torch.randn(tokens, 7168, device="cuda").bfloat16(), torch.randn(tokens, 4096, device="cuda").bfloat16()
    q_a, q_weight = torch.randn(tokens, 2112, device="cuda").bfloat16()[:, :1536], torch.ones(1536, device="cuda")
    residual, weight = torch.randn_like(x), torch.ones(7168, device="cuda")
    router, bias = torch.randn(256, 7168, device="cuda").bfloat16(), torch.randn(256, device="cuda") * 0.1
    kind = {"scoring": "sigmoid", "top_k": 8, "num_groups": 8, "top_groups": 4, "normalize": True, "scaling_factor": 2.5}
    result = {
        "case": "around the products", "tokens": tokens,
        "quantize_us": graph_us(lambda _: gemm.quantize_1x128(x), 50),
        "silu_quantize_us": graph_us(lambda _: gemm.silu_and_mul_quantized(gate_up), 50),
        "norm_us": graph_us(lambda _: rms_norm(x, weight, eps=1e-6, residual=residual), 50),
        "norm_quantize_us": graph_us(
            lambda _: rms_norm_quantized(x, weight, eps=1e-6, residual=residual, keep_plain=True), 50
        ),
        "q_norm_quantize_us": graph_us(lambda _: rms_norm_quantized(q_a, q_weight, eps=1e-6, keep_plain=False), 50),
        "choose_experts_us": graph_us(lambda _: moe.choose_experts(x, router, bias, **kind), 50),
    }  # fmt: skip
    print({key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}, flush=True)
    return result


def latent_case(tokens: int, rate: float) -> dict[str, object]:
    """The products with the halves of kv_b and what is fused with them, beside the separate steps; weights from memory.

    goal_us counts the weight's bytes alone, as for the dense layers; query_goal_us and values_goal_us the rows' as well.
    """
    heads, copies = 128, 12
    kv_b = [torch.randn(heads, 256, 512, device="cuda").bfloat16() for _ in range(copies)]
    w_uk, w_uv = [w[:, :128] for w in kv_b], [w[:, 128:].transpose(1, 2) for w in kv_b]
    q, out = (torch.randn(tokens, heads, d, device="cuda").bfloat16() for d in (192, 512))
    table, positions = torch.randn(4096, 64, device="cuda"), torch.randint(0, 4096, (tokens,), device="cuda")

    def separate_query(i: int) -> object:
        content = torch.bmm(q[..., :128].transpose(0, 1), w_uk[i % copies]).transpose(0, 1)
        return quantize_q(content, q[..., 128:], positions, table, fmt=CacheFormat.FP8)

    def separate_values(i: int) -> object:
        return gemm.quantize_1x128(torch.bmm(out.transpose(0, 1), w_uv[i % copies]).transpose(0, 1).flatten(1))

    size = heads * 128 * 512 * 2
    # What goes in and out is as much as the weight at 64 tokens.
    query = size + tokens * heads * (2 * 192 + 512 + 2 * 64 + 4)
    values = size + tokens * heads * (2 * 512 + 128 + 4)
    result = {
        "case": "kv_b halves", "tokens": tokens, "bytes": size, "goal_us": size / (GOAL_SHARE * rate) * 1e6 + GOAL_EXTRA_US,
        "query_goal_us": query / (GOAL_SHARE * rate) * 1e6 + GOAL_EXTRA_US,
        "values_goal_us": values / (GOAL_SHARE * rate) * 1e6 + GOAL_EXTRA_US,
        "absorb_query_us": graph_us(lambda i: absorb_query(q, w_uk[i % copies], positions, table, fmt=CacheFormat.FP8), 24),
        "absorb_query_separate_us": graph_us(separate_query, 24),
        "project_values_us": graph_us(lambda i: project_values(out, w_uv[i % copies], quantize=True), 24),
        "project_values_separate_us": graph_us(separate_values, 24),
    }  # fmt: skip
    print({key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 128], help="batch sizes of the dense layers")
    parser.add_argument("--layers", nargs="*", choices=list(DENSE), default=list(DENSE))
    parser.add_argument("--experts", nargs="*", choices=list(EXPERTS), default=list(EXPERTS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.manual_seed(0)
    rate = read_rate()
    state = machine_state() | {"read_rate": rate}
    print(f"read rate {rate / 1e12:.2f} TB/s; {state['gpu']}", flush=True)
    for result in _cases(args, rate):
        with args.output.open("a") as out:
            out.write(json.dumps(state | {"gpu_after": machine_state()["gpu"]} | result) + "\n")


def _cases(args: argparse.Namespace, rate: float) -> Iterator[dict[str, object]]:
    """Most wanted first; a run that is cut keeps the lines it has."""
    for name in args.layers:
        yield from dense_case(name, *DENSE[name], args.tokens, rate)
    yield from (latent_case(m, rate) for m in args.tokens)
    for name in args.experts:
        yield expert_case(name, EXPERTS[name], rate, quantized=True)
    if args.layers:
        yield from (mlp_case("shared expert", 7168, 2048, m, rate) for m in args.tokens)
    yield from (small_kernels(m) for m in (16, 64))
    if args.experts:
        yield expert_case(args.experts[-1], EXPERTS[args.experts[-1]], rate, quantized=False)


if __name__ == "__main__":
    main()
