"""The whole engine on CUDA devices, with the demo model: equal tokens, and speed. One JSON line per finding.

    python -m benchmarks.engine_on_gpu                      # all parts
    python -m benchmarks.engine_on_gpu --parts kernels speed

kernels   Hopper kernels against the reference backend, same FP8 cache: 20 prompts of 256 greedy tokens
graphs    graph replay against eager at batch sizes around the captured ones; asynchronous against synchronous
speed     decode steps/s at batch 1, tokens/s at larger batches

Several devices: `python -m benchmarks.eight_gpus --parts answers`.

"Same tokens" is tests/comparator.py's: a difference is excused only where the reference's two best tokens lie closer
than twice the noise, and the noise is measured between two configurations that differ by rounding alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import Log, run_parts
from engine.llm import LLM, RequestOutput
from engine.sampling_params import SamplingParams
from kernels import ops
from tests.comparator import Differences, Generation, assert_same_generations

NUM_TOKENS = 256
CACHE_BYTES = 2 << 30  # of each rank
HELDOUT = Path(__file__).parent / "demo_model" / "heldout.jsonl"


def prompts(count: int, words: int = 40) -> list[str]:
    """Excerpts of differing lengths from all over the held-out texts."""
    text = " ".join(json.loads(line)["text"] for line in HELDOUT.read_text().splitlines()).split()
    stride = len(text) // count
    return [" ".join(text[i * stride : i * stride + words // 2 + (7 * i) % words]) for i in range(count)]


def greedy(count: int, logprobs: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2 if logprobs else None)


def llm(**options: object) -> LLM:
    reference = options.get("kernels") == "reference"
    ops.use_backend("reference" if reference else None)
    return LLM("demo", device="cuda", cache_memory_bytes=CACHE_BYTES, **options)


def eager_llm() -> LLM:
    return llm(cuda_graphs=False, async_scheduling=False)


def generate(engine: LLM, texts: Sequence[str], params: SamplingParams) -> tuple[list[RequestOutput], float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    results = engine.generate(list(texts), params, use_tqdm=False)
    return results, time.perf_counter() - started


def generations(results: Sequence[RequestOutput]) -> list[Generation]:
    found = []
    for result in results:
        choice = result.outputs[0]
        assert choice.logprobs is not None
        entries = [{token: value.logprob for token, value in entry.items()} for entry in choice.logprobs]
        found.append(Generation(list(choice.token_ids), entries))
    return found


def compare(got: Sequence[Generation], want: Sequence[Generation], noise: Differences, label: str) -> dict[str, object]:
    """Check same tokens; returns what a line says about it."""
    found, equal = assert_same_generations(got, want, noise, f"{label}: ")
    same = sum(a.token_ids == b.token_ids for a, b in zip(got, want))
    return {
        "median": round(found.median, 5), "p99": round(found.p99, 5), "largest": round(found.largest, 5), "positions": found.positions,
        "noise": [round(value, 5) for value in (noise.median, noise.p99, noise.largest)], "prompts": len(got), "fully_equal": same,
        "tokens_equal": equal,
    }  # fmt: skip


def noise_of_batching(engine: LLM, texts: Sequence[str], num_tokens: int) -> tuple[list[Generation], Differences]:
    """Greedy continuations, and how far they move when each prompt runs alone."""
    together = generations(engine.generate(list(texts), greedy(num_tokens), use_tqdm=False))
    alone = [generations(engine.generate([text], greedy(num_tokens), use_tqdm=False))[0] for text in texts]
    return together, Differences.between(alone, together)


def kernels(results: Log) -> None:
    """The noise is the reference backend's own, between BF16 and FP32 activations."""
    texts = prompts(20)
    outputs, seconds = generate(llm(kernels="reference"), texts, greedy(NUM_TOKENS))
    want = generations(outputs)
    results.write(part="kernels", backend="reference", tokens_per_s=round(20 * NUM_TOKENS / seconds, 1))
    exact = generations(generate(llm(kernels="reference", dtype="float32", cache_format="fp8"), texts, greedy(NUM_TOKENS))[0])
    noise = Differences.between(exact, want)
    for fmt in ("fp8", "bf16"):
        engine = llm(cache_format=fmt)
        generate(engine, texts, greedy(8))
        outputs, seconds = generate(engine, texts, greedy(NUM_TOKENS))
        found = compare(generations(outputs), want, noise, "fp8 kernels") if fmt == "fp8" else {}
        results.write(part="kernels", backend="hopper", cache=fmt, tokens_per_s=round(20 * NUM_TOKENS / seconds, 1), **found)


def graphs(results: Log) -> None:
    want, noise = noise_of_batching(eager_llm(), prompts(20), 96)
    started = time.perf_counter()
    free = torch.cuda.mem_get_info()[0]
    captured = llm(async_scheduling=False)
    results.write(
        part="graphs",
        what="start with capture",
        seconds=round(time.perf_counter() - started, 2),
        bytes=free - torch.cuda.mem_get_info()[0],
    )
    overlapped = llm()
    for count in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 20):
        for name, engine in (("graph", captured), ("graph, asynchronous", overlapped)):
            got = generations(generate(engine, prompts(20)[:count], greedy(96))[0])
            results.write(part="graphs", what=name, batch=count, **compare(got, want[:count], noise, f"{name} at {count}"))


def speed(results: Log) -> None:
    engine = llm(max_num_seqs=256)
    texts = prompts(256)
    for batch in (1, 8, 64, 256):
        chosen = texts[:batch]
        generate(engine, chosen, greedy(16, logprobs=False))
        generate(engine, chosen, greedy(32 + NUM_TOKENS, logprobs=False))
        _, short = generate(engine, chosen, greedy(32, logprobs=False))
        _, long = generate(engine, chosen, greedy(32 + NUM_TOKENS, logprobs=False))
        step = (long - short) / NUM_TOKENS  # prefill and start-up cancel
        results.write(part="speed", batch=batch, steps_per_s=round(1 / step, 1), tokens_per_s=round(batch / step, 1))


def ask(port: int, text: str, num_tokens: int) -> Generation:
    """A greedy completion by HTTP."""
    body = {
        "prompt": text, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    choice = json.loads(urllib.request.urlopen(request, timeout=300).read())["choices"][0]
    # Candidates come by text; only the chosen token's id is known.
    chosen = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    return Generation(choice["token_ids"], [{token: value} for token, value in chosen])


def ask_all(port: int, texts: Sequence[str], num_tokens: int) -> list[Generation]:
    """`ask` for every text, 16 at a time."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda text: ask(port, text, num_tokens), texts))


PARTS = {"kernels": kernels, "graphs": graphs, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/engine_on_gpu.jsonl"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("engine_on_gpu needs a CUDA device")
    results = Log(options.output)
    raise SystemExit(not run_parts({name: functools.partial(PARTS[name], results) for name in options.parts}))


if __name__ == "__main__":
    main()
