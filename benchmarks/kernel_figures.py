"""Figures that need the Hopper kernels, on one GPU: `python -m benchmarks.kernel_figures [--quick] [--only fig7 fig6 ...]`.

    fig7      batch 32, heads 16 to 128, 1 to 4 query tokens, 1k to 128k: FP8 and BF16, beside the ceilings of the same run
    fig6      heads and batch of a rank of each DP/TP setting of DeepSeek-V3.1 and LongCat-Flash, 16k to 128k
    context   error of the kernels' own outputs against context length; and P.V as one product with fast accumulation, which
              keeps everything in the tensor core ("single-level" on the chip), beside the promoted form
    probe     time of a decode step without the fidelity probe, with one that never compares, and at 1 %: the demo model, and one
              simulated rank of eight layers of DeepSeek-V3.1

Timing is kernel_decode's: graph replays over rotated tables, warm, medians. Other kernels are timed where they are installed.
Appends to results/kernel_figures.jsonl and skips what is there; a point takes about a quarter of a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.activations import Attention, synthetic
from benchmarks.harness import Log
from benchmarks.kernel_decode import Bench
from benchmarks.numerics import LONGEST, contexts, errors, output
from benchmarks.records import RESULTS, Records, read
from benchmarks.schemes import BF16, EXACT, SNAPMLA, Scheme
from engine.core import EngineCore
from engine.llm import build_core, engine_config
from engine.messages import AddRequest
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.layout import BLOCK_SIZE, FP8, FP8_MAX, CacheFormat, LatentCache, LatentQuery
from kernels.reference.latent import quantize_rows

PARTS = ("fig7", "fig6", "context", "probe")
SEED = 0
MODELS = {"DeepSeek-V3.1": (128, 61), "LongCat-Flash": (64, 56)}  # heads, attention layers
SETTINGS = ((1, 8), (4, 2), (8, 1))  # DP, TP
PROBE_STEPS = 100  # of a turn; at 1 % exactly one of them compares
CACHE_BYTES = 35e9  # of a rank, beside weights and activations on eight H200
METHOD = {
    "fig7": "graph replays over rotated block tables, 120 ms warm, median of 60 ms",
    "fig6": "as fig7; batch: the largest power of two whose BF16 cache fits 35 GB of a rank, the same for FP8",
    "context": "kernel output against FP32 attention on the unrounded values; one P.V product by torch._scaled_mm",
    "probe": f"wall time a decode step of the engine, graphs on, asynchronous; engines take turns of {PROBE_STEPS} steps, medians over turns",
}


def batch_that_fits(layers: int, length: int) -> int:
    """Sequences of a replica for fig6."""
    most = int(CACHE_BYTES / (CacheFormat.BF16.bytes_per_token(512, 64) * layers * length))
    return 1 << max(0, most.bit_length() - 1)


def timing_cases(quick: bool, parts: list[str]) -> list[dict[str, Any]]:
    """Every point of fig7 and fig6 as Bench.case takes it, with what it stands for."""
    cases: list[dict[str, Any]] = []
    if "fig6" in parts:
        for model, (heads, layers) in MODELS.items():
            for dp, tp in SETTINGS:
                cases += [
                    {"figure": "fig6", "model": model, "dp": dp, "tp": tp, "heads": heads // tp, "query_len": 1,
                     "batch": batch_that_fits(layers, length), "length": length}
                    for length in (16384, 32768, 65536, 131072)
                ]  # fmt: skip
    if "fig7" in parts:
        for query_len in (1, 2, 3, 4):
            fewer = (1024, 4096, 16384, 32768, 131072) if query_len < 3 else (4096, 32768, 131072)
            for length in fewer if quick else [1024 << i for i in range(8)]:
                cases += [
                    {"figure": "fig7", "heads": heads, "query_len": query_len, "batch": 32, "length": length}
                    for heads in (16, 32, 64, 128)
                ]
    return cases


def timings(out: Path, quick: bool, parts: list[str]) -> None:
    todo = timing_cases(quick, parts)
    formats = (CacheFormat.FP8, CacheFormat.BF16)
    done = read(out)
    missing = [
        (case, fmt) for case in todo for fmt in formats
        if not any(all(line.get(k) == v for k, v in (case | {"format": fmt.value}).items()) for line in done)
    ]  # fmt: skip
    if not missing:
        return
    log = Log(out)
    base = log.state | {"seed": SEED}
    benches = {fmt: Bench(fmt, log, workloads.POOL_BLOCKS, peers=True) for fmt in formats}
    for case, fmt in missing:  # a run that is stopped leaves pairs
        log.state = base | case | {"method": METHOD[case["figure"]]}
        benches[fmt].case(f"{case['length'] // 1024}k", [case["length"]] * case["batch"], case["heads"], case["query_len"])
    del benches
    torch.cuda.empty_cache()


# ---- error against context, on the chip


def kernel_output(layer: Attention, fmt: CacheFormat) -> torch.Tensor:
    """[n, H, C] of the kernel for queries that all see the whole context; n sequences share one table."""
    length, n = len(layer.content), len(layer.visible)
    if fmt is CacheFormat.FP8:
        codes, scale = quantize_rows(layer.content)
        stored = codes, (layer.rope / scale.unsqueeze(1)).bfloat16(), scale
        q_codes, q_scale = quantize_rows(layer.query[0])
        query = LatentQuery(q_codes, (layer.query[1] / q_scale.unsqueeze(-1)).bfloat16(), q_scale)
    else:
        stored = layer.content.bfloat16(), layer.rope.bfloat16(), None
        query = LatentQuery(layer.query[0].bfloat16(), layer.query[1].bfloat16(), None)
    cache = LatentCache(*(None if part is None else part.unflatten(0, (-1, BLOCK_SIZE)).contiguous() for part in stored))  # type: ignore[arg-type]
    table = torch.arange(length // BLOCK_SIZE, dtype=torch.int32, device="cuda").expand(n, -1).contiguous()
    lens = layer.visible.int()
    plan = ops.plan_decode(lens, query_len=1, num_heads=query.content.shape[1], fmt=fmt)
    out, _ = ops.mla_decode(
        query.unflatten(n, 1),
        cache,
        table,
        lens,
        softmax_scale=layer.softmax_scale,
        causal=True,
        plan=plan,
        out_dtype=torch.bfloat16,
    )
    return out[:, 0].float()


def one_product(layer: Attention, fast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """P.V of SnapMLA's codes with one scale a row, as one FP8 product, and the same in FP64: [128, C]."""
    codes, scale = quantize_rows(layer.content)
    q = (layer.query[0].flatten(0, 1)[:128], layer.query[1].flatten(0, 1)[:128])
    scores = (q[0] @ layer.content.T + q[1] @ layer.rope.T) * layer.softmax_scale + scale.log()
    p = ((scores - scores.amax(1, keepdim=True)).exp() * FP8_MAX).to(FP8)
    v = codes.t().contiguous().t()  # column-major, as the product wants it
    one = torch.ones((), device="cuda")
    out = torch._scaled_mm(p, v, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return out.float(), p.double() @ v.double()


def context(out: Path) -> None:
    done = read(out)
    log = Log(out)
    for mean in (0.0, 0.5):
        longest = synthetic(LONGEST, 300.0, mean=mean, heads=16, queries=8, seed=SEED).to("cuda")
        for tokens in contexts(False):
            key = {"figure": "context", "data": "synthetic", "mean": mean, "outlier": 300.0, "tokens": tokens}
            if not any(all(line.get(k) == v for k, v in key.items()) for line in done):
                layer = longest.beginning(tokens, 8)
                exact = output(EXACT, layer)
                log.state |= {"seed": SEED} | key | {"method": METHOD["context"]}
                schemes: tuple[tuple[CacheFormat, Scheme], ...] = (
                    (CacheFormat.FP8, replace(SNAPMLA, p_block=128)), (CacheFormat.BF16, BF16),
                )  # fmt: skip
                for fmt, scheme in schemes:
                    measured = kernel_output(layer, fmt)
                    log.write(
                        sums=f"{fmt.value} kernel",
                        **errors(measured, exact),
                        alone=errors(measured, output(scheme, layer))["relative"],
                    )
                for fast in (True, False):
                    product, true = one_product(layer, fast)
                    log.write(
                        sums="one product, fast" if fast else "one product, promoted", alone=errors(product, true)["relative"]
                    )
                print(f"context, mean {mean}: {tokens} tokens", flush=True)


# ---- the probe


@dataclass(frozen=True)
class ProbeCase:
    """model: "demo", or a published shape of which `layers` are kept and one rank of eight is simulated; turns: (full, quick)"""

    model: str
    layers: int
    batch: int
    turns: tuple[int, int]

    def engine(self, folder: Path) -> tuple[str, dict[str, Any]]:
        """Model and options of its engines; a shape is cut in `folder`, so that three fit one device."""
        lengths = {"max_num_seqs": self.batch, "max_model_len": 4096, "num_cache_blocks": 64 * self.batch + 8}
        if self.model == "demo":
            return "demo", lengths
        cut = workloads.cut_layers(self.model, self.layers, folder)
        return str(cut), lengths | {"load_format": "dummy", "simulate_world": "dp=8,tp=1,ep=8"}


PROBE_CASES = (ProbeCase("deepseek_v3.1", 8, 32, (24, 10)), ProbeCase("demo", 0, 32, (32, 16)))
PROBE_FRACTIONS = {"off": 0.0, "writing": 1e-9, "on": 0.01}  # without a probe, with one that never compares, at 1 %


def start(core: EngineCore, batch: int) -> None:
    """Begin sequences that outlast the measurement, and step until all decode."""
    params = SamplingParams(temperature=0.0, max_tokens=3800, ignore_eos=True)
    for index in range(batch):
        core.add(AddRequest(f"probe-{index}", [3 + index] * 256, params, time.time()))
    waiting = {f"probe-{index}" for index in range(batch)}
    while waiting:
        waiting -= {output.request_id for output in core.step()}
    for _ in range(8):
        core.step()


def decode_ms(core: EngineCore, steps: int) -> float:
    """Milliseconds a decode step; each waits for the result of the one before."""
    began = time.perf_counter()
    for _ in range(steps):
        core.step()
    return 1e3 * (time.perf_counter() - began) / steps


def probe(log: Log | Records, case: ProbeCase, turns: int, device: str = "cuda", steps: int = PROBE_STEPS) -> None:
    """Three engines side by side take turns of few steps, so that all see the same clocks and the same moods of the host;
    overheads are medians of the turns' ratios."""
    cores: dict[str, EngineCore] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, options = case.engine(Path(folder))
        for name, fraction in PROBE_FRACTIONS.items():
            chosen = options | {"device": device, "prefix_cache": False, "fidelity_fraction": fraction}
            cores[name] = build_core(engine_config(model, chosen))[0]
    for core in cores.values():
        start(core, case.batch)
    times: dict[str, list[float]] = {name: [] for name in cores}
    names = list(cores)
    for turn in range(turns):
        for name in names[turn % 3 :] + names[: turn % 3]:
            times[name].append(decode_ms(cores[name], steps))
    over = {name: [on / off - 1 for on, off in zip(times[name], times["off"])] for name in ("writing", "on")}
    compared = cores["on"].stats()
    assert compared.fidelity_steps > 0, "no step was compared"
    log.write(
        figure="probe", seed=SEED, method=METHOD["probe"], model=case.model, layers=case.layers, batch=case.batch, steps=steps, ms=times,
        overhead=statistics.median(over["on"]), overhead_turns=over["on"], overhead_writing=statistics.median(over["writing"]),
        overhead_writing_turns=over["writing"], fidelity_steps=compared.fidelity_steps, fidelity_mean=compared.fidelity_mean,
    )  # fmt: skip
    shown = "  ".join(f"{name} {statistics.median(values):.3f} ms" for name, values in times.items())
    low, _, high = statistics.quantiles(over["on"], n=4) if turns > 1 else over["on"] * 3
    print(
        f"probe, {case.model}: {shown}; at 1 % {100 * statistics.median(over['on']):+.2f} % (quartiles {100 * low:+.2f}, {100 * high:+.2f}), "
        f"never comparing {100 * statistics.median(over['writing']):+.2f} %",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fig7 at fewer lengths, fewer turns of the probe")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel_figures.jsonl")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernel_figures needs a Hopper GPU; benchmarks.plots draws what results/kernel_figures.jsonl has")
    torch.manual_seed(SEED)
    with torch.inference_mode():
        timings(args.out, args.quick, args.only)
        if "context" in args.only:
            context(args.out)
    measured = {line["model"] for line in read(args.out) if line.get("figure") == "probe"}
    for case in PROBE_CASES if "probe" in args.only else ():
        if case.model not in measured:
            probe(Log(args.out), case, case.turns[args.quick])
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
