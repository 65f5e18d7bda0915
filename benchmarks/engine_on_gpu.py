"""The whole engine on CUDA devices, with the demo model: equal tokens, and speed. One JSON line per finding.

    python -m benchmarks.engine_on_gpu                      # all parts that the machine has devices for
    python -m benchmarks.engine_on_gpu --parts kernels speed

kernels   Hopper kernels against the reference backend, same FP8 cache: 20 prompts of 256 greedy tokens
graphs    graph replay against eager at batch sizes around the captured ones; asynchronous against synchronous
mtp       speculation k = 1..3 against k = 0: tokens and speed at batch 1, 8, 64
speed     decode steps/s at batch 1, tokens/s at larger batches
parallel  two devices through the launcher: 2x1 and 1x2 against one process, 50 prompts, 16 at a time

"Same tokens" is tests/comparator.py's: a difference is excused only where the reference's two best tokens lie closer
than twice the noise, and the noise is measured: the largest difference of log probabilities at equal contexts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness import Log
from engine.llm import LLM, RequestOutput
from engine.sampling_params import SamplingParams
from kernels import ops
from tests.comparator import assert_same_tokens

PARTS = ("kernels", "graphs", "mtp", "speed", "parallel")
NUM_TOKENS = 256
MOST_NOISE = 0.25  # log probabilities, 99th percentile: more is no rounding
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
    return LLM("demo", device="cuda", cache_memory_bytes=2 << 30, **options)


def generate(engine: LLM, texts: Sequence[str], params: SamplingParams) -> tuple[list[RequestOutput], float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    results = engine.generate(list(texts), params, use_tqdm=False)
    return results, time.perf_counter() - started


def compare(got: list[RequestOutput], want: list[RequestOutput], label: str) -> dict[str, object]:
    """Check same tokens; returns the differences of log probabilities at equal contexts and how far the runs were equal.

    The noise is the 99.9th percentile: beyond it lie single positions where rounding sent a token to another expert.
    """
    differences, pairs = [], []
    for a, b in zip(got, want):
        x, y = a.outputs[0], b.outputs[0]
        assert x.logprobs is not None and y.logprobs is not None
        assert len(x.token_ids) == len(y.token_ids), f"{label}: {len(x.token_ids)} tokens, expected {len(y.token_ids)}"
        here = []
        for mine, theirs, token, other in zip(x.logprobs, y.logprobs, x.token_ids, y.token_ids):
            here.append(max((abs(mine[t].logprob - theirs[t].logprob) for t in mine if t in theirs), default=0.0))
            if token != other:
                break  # contexts differ from here on
        differences += here
        # A position whose own logits are seen to differ by more is judged by that.
        gaps = [top_gap(entry) - 2 * difference for entry, difference in zip(y.logprobs, [*here, *[0.0] * len(y.logprobs)])]
        pairs.append((x.token_ids, y.token_ids, gaps))
    values = torch.tensor(differences, dtype=torch.float64)
    median, p99, noise = (float(values.quantile(q)) for q in (0.5, 0.99, 0.999))
    found: dict[str, object] = {
        "median_difference": round(median, 5), "p99": round(p99, 5), "noise": round(noise, 5), "largest": round(float(values.max()), 5),
        "positions": len(values), "prompts": len(pairs),
    }  # fmt: skip
    assert median <= 0.03 and p99 <= MOST_NOISE, f"{label}: {found}"
    equal = [assert_same_tokens(x, y, gaps=gaps, noise=max(noise, 1e-6), label=f"{label}: ") for x, y, gaps in pairs]
    return found | {"fully_equal": sum(e == len(y) for e, (_, y, _) in zip(equal, pairs)), "tokens_equal": sum(equal)}


def top_gap(entry: dict) -> float:
    best = sorted((value.logprob for value in entry.values()), reverse=True)
    return best[0] - best[1]


def kernels(results: Log) -> None:
    texts = prompts(20)
    want, seconds = generate(llm(kernels="reference"), texts, greedy(NUM_TOKENS))
    results.write(part="kernels", backend="reference", tokens_per_s=round(20 * NUM_TOKENS / seconds, 1))
    for fmt in ("fp8", "bf16"):
        engine = llm(cache_format=fmt, cuda_graphs=False)
        generate(engine, texts, greedy(8))
        got, seconds = generate(engine, texts, greedy(NUM_TOKENS))
        found = compare(got, want, f"{fmt} kernels") if fmt == "fp8" else {}
        results.write(part="kernels", backend="hopper", cache=fmt, tokens_per_s=round(20 * NUM_TOKENS / seconds, 1), **found)


def graphs(results: Log) -> None:
    eager = llm(cuda_graphs=False, async_scheduling=False)
    want, _ = generate(eager, prompts(20), greedy(96))
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
            got, _ = generate(engine, prompts(20)[:count], greedy(96))
            found = compare(got, want[:count], f"{name} at {count}")
            results.write(part="graphs", what=name, batch=count, **found)


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


def mtp(results: Log) -> None:
    engines = {depth: llm(num_speculative_tokens=depth) for depth in (0, 1, 2, 3)}
    texts = prompts(20)
    want, _ = generate(engines[0], texts, greedy(128))
    for depth in (1, 2, 3):
        got, _ = generate(engines[depth], texts, greedy(128))
        results.write(part="mtp", what="equal tokens", depth=depth, **compare(got, want, f"mtp {depth}"))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=11)
        for batch in (1, 8, 64):
            base = 0.0
            for depth, engine in engines.items():
                chosen = prompts(64)[:batch]
                generate(engine, chosen, SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, seed=11))
                before = engine.stats()
                _, seconds = generate(engine, chosen, params)
                after = engine.stats()
                rate = batch * NUM_TOKENS / seconds
                base = base or rate
                drafts = after.spec_drafts - before.spec_drafts
                per_pos = [
                    round((a - b) / max(drafts, 1), 3)
                    for a, b in zip(after.spec_accepted_per_pos, before.spec_accepted_per_pos)
                ]
                results.write(
                    part="mtp", what="speed", temperature=temperature, batch=batch, depth=depth, tokens_per_s=round(rate, 1),
                    speed_up=round(rate / base, 3), accepted_per_pos=per_pos, tokens_per_step=round(1 + sum(per_pos), 3),
                )  # fmt: skip


def parallel(results: Log) -> None:
    texts = prompts(50)
    want, _ = generate(llm(), texts, greedy(64))
    for dp, tp in ((2, 1), (1, 2)):
        with Served(dp, tp) as port:
            ask(port, texts[0], 64)
            started = time.perf_counter()
            answers = ask_all(port, texts, 64)
            seconds = time.perf_counter() - started
        found = compare_answers(answers, want, f"{dp}x{tp}")
        results.write(part="parallel", dp=dp, tp=tp, tokens_per_s=round(64 * len(texts) / seconds, 1), **found)


def ask(port: int, text: str, num_tokens: int) -> dict:
    """The choice of a greedy completion with token ids and two log probabilities a token."""
    body = {
        "prompt": text, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=300).read())["choices"][0]


def ask_all(port: int, texts: Sequence[str], num_tokens: int) -> list[dict]:
    """`ask` for every text, 16 at a time."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda text: ask(port, text, num_tokens), texts))


def compare_answers(answers: Sequence[dict], want: Sequence[RequestOutput], label: str) -> dict[str, object]:
    """Check a server's answers against `want`, token by token; the noise is the largest difference at equal contexts."""
    noise, cases = 0.0, []
    for answer, result in zip(answers, want, strict=True):
        reference, ids = result.outputs[0], answer["token_ids"]
        assert reference.logprobs is not None
        for position, (mine, theirs) in enumerate(zip(ids, reference.token_ids)):
            if mine != theirs:
                break
            logprob = answer["logprobs"]["token_logprobs"][position]
            noise = max(noise, abs(logprob - reference.logprobs[position][theirs].logprob))
        cases.append((ids, reference.token_ids, [top_gap(entry) for entry in reference.logprobs]))
    assert noise <= MOST_NOISE, f"{label}: log probabilities differ by {noise:.3f}"
    equal = [assert_same_tokens(a, b, gaps=g, noise=max(noise, 1e-6), label=f"{label}: ") for a, b, g in cases]
    return {
        "prompts": len(cases), "noise": round(noise, 5), "fully_equal": sum(e == len(b) for e, (_, b, _) in zip(equal, cases)),
        "tokens_equal": sum(equal),
    }  # fmt: skip


class Served:
    """The launcher on a free port, ended on exit."""

    def __init__(self, dp: int, tp: int) -> None:
        command = [
            sys.executable,
            "-m",
            "engine.launch",
            "--dp",
            str(dp),
            "--tp",
            str(tp),
            "--port",
            "0",
            "--cache-memory-bytes",
            str(2 << 30),
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
        )

    def __enter__(self) -> int:
        assert self._process.stdout is not None
        seen = []
        for line in self._process.stdout:
            seen.append(line)
            if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                port = int(match[1])
                break
        else:
            raise RuntimeError("the launcher ended:\n" + "".join(seen))
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
                return port
            except OSError:
                time.sleep(0.5)
        raise RuntimeError("the server did not become ready:\n" + "".join(seen))

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/engine_on_gpu.jsonl"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("engine_on_gpu needs a CUDA device")
    results = Log(options.output)
    failed = False
    for name in options.parts:
        if name == "parallel" and torch.cuda.device_count() < 2:
            print("parallel: left out, one device")
            continue
        started = time.perf_counter()
        try:
            globals()[name](results)
        except Exception as error:  # one part's failure must not hide the others' findings
            failed = True
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:2000]}", flush=True)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
