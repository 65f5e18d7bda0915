"""Time to the first token of one prompt on an idle engine: `python -m benchmarks.prefill [--models demo deepseek_v3.1]`.

Prompts of random tokens, computed in chunks of the default budget (8,192 tokens), go through the whole engine: scheduler,
chunks, context pieces fetched from the FP8 cache and expanded, sampling. The first prompt of a length warms up; then the
median of the others counts. Published shapes run as one simulated rank with dummy weights: the rank's own prompt, and the
experts' load of all ranks' prompts.

Beside it stands attention's own share: every attention call of the prompt is timed again alone, on random operands of its
shape (on Hopper that is cuDNN's kernel and the filling of its outputs), and the sum is divided by the time to the first token.

One JSON line a case in results/prefill.jsonl; a case that is there, for this device and revision, is skipped.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RESULTS, Records
from benchmarks.workloads import SHAPES
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.llm import build_core
from engine.messages import AddRequest, TokenOutput
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.layout import BLOCK_SIZE

WORLDS = {"deepseek_v3.1": "dp=8,tp=1", "kimi_k2": "dp=16,tp=1", "longcat_flash": "dp=8,tp=1"}
LENGTHS = (1024, 8192, 32768)
METHOD = "one prompt at a time through the engine, median after one warm-up; attention calls again alone, median of 3"


@dataclass(frozen=True)
class AttentionCall:
    """Shape of one call of ops.prefill_attention on a single sequence."""

    queries: int
    keys: int
    heads: int
    key_dim: int
    value_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """A causal square needs the pairs on and below its diagonal."""
        pairs = self.queries * (self.queries + 1) / 2 if self.causal else self.queries * self.keys
        return 2 * self.heads * pairs * (self.key_dim + self.value_dim)

    def seconds(self, device: torch.device, dtype: torch.dtype) -> float:
        """Median of three, after one that does not count."""
        q, k = (torch.randn(n, self.heads, self.key_dim, device=device, dtype=dtype) for n in (self.queries, self.keys))
        v = torch.randn(self.keys, self.heads, self.value_dim, device=device, dtype=dtype)
        lens_q, lens_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (self.queries, self.keys))
        times = []
        for _ in range(4):
            _synchronize(device)
            start = time.perf_counter()
            ops.prefill_attention(
                q, k, v, lens_q, lens_k,
                max_len_q=self.queries, max_len_k=self.keys, softmax_scale=self.key_dim**-0.5, causal=self.causal,
            )  # fmt: skip
            _synchronize(device)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def recorded(calls: Counter[AttentionCall]) -> Iterator[None]:
    """Count the attention calls of single sequences by their shape."""
    original = ops.prefill_attention

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lens: torch.Tensor, **options: Any) -> Any:
        assert lens[0].shape[0] == 2, "one prompt at a time"
        calls[AttentionCall(q.shape[0], k.shape[0], q.shape[1], q.shape[2], v.shape[2], options["causal"])] += 1
        return original(q, k, v, *lens, **options)

    ops.prefill_attention = call
    try:
        yield
    finally:
        ops.prefill_attention = original


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


def measure(
    core: EngineCore, vocab: int, length: int, repeats: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of a line."""
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(2, vocab, (1 + repeats, length), generator=generator).tolist()
    calls: Counter[AttentionCall] = Counter()
    with recorded(calls):
        first_token_seconds(core, f"{length}-warm", prompts[0])
    seconds = statistics.median(first_token_seconds(core, f"{length}-{i}", ids) for i, ids in enumerate(prompts[1:]))
    with torch.inference_mode():
        attention = sum(count * call.seconds(device, dtype) for call, count in calls.items())
    return {
        "first_token_seconds": seconds,
        "tokens_per_s": length / seconds,
        "repeats": repeats,
        "attention_seconds": attention,
        "attention_share": attention / seconds,
        "attention_flops_per_s": sum(count * call.flops for call, count in calls.items()) / attention,
        "attention_calls": sum(calls.values()),
    }


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
        for length in sorted(min(length, info.max_model_len - BLOCK_SIZE) for length in args.lengths):
            key = {"figure": "prefill", "model": folder.name, "world": world, "tokens": length, "chunk": args.chunk}
            if records.has(**key, device=records.state["device"], git=records.state["git"]):
                continue
            repeats = args.repeats if length < 16384 else 1
            dtype = getattr(torch, info.dtype)
            found = measure(core, info.model_config.vocab_size, length, repeats, device, dtype)
            records.write(**key, cache_format=info.cache_format, **found)
            print(
                f"{'SIMULATED rank of ' if world else ''}{folder.name} {world} {length} tokens: first token after "
                f"{1e3 * found['first_token_seconds']:.1f} ms, {found['tokens_per_s']:.0f} tokens/s; attention's own time "
                f"{found['attention_share']:.2f} of it at {found['attention_flops_per_s'] / 1e12:.1f} TFLOP/s",
                flush=True,
            )
        del core
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
