"""HTTP load on a server that this script launches, and what the server itself says of it: `python -m benchmarks.serving`.

Streams of equal length keep `--concurrency` connections busy. Measured at the client: time to first token, time between
tokens (several tokens of one chunk share its time), whole requests. Measured at the server: `/metrics` over the same
requests, whose counts must be equal; CPU time of the front end and of the workers' transport threads per output token; the
share of step time outside the model; the time from a token's arrival at the front end to the write to its socket.
Appends one JSON line to --output (results/serving.jsonl). Options after `--` go to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.records import RESULTS, append, machine_state
from tests.distributed.launched import PYTHON, Launched, environment, posted

WORDS = [
    "In",
    "the",
    "beginning",
    "king",
    "said",
    "unto",
    "his",
    "servants",
    "that",
    "they",
    "went",
    "down",
    "to",
    "river",
    "and",
    "saw",
    "sea",
]


@dataclass
class Request:
    """Times in seconds. tokens: arrival of every output token."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    done: float = 0.0
    prompt_tokens: int = 0


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds."""
    ordered = sorted(1000 * value for value in values)
    pick = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}
    return {"mean": statistics.fmean(ordered), **pick}


async def one(port: int, prompt: str, max_tokens: int) -> Request:
    """A streamed completion; tokens are counted by their ids, not by chunks."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent = posted(body, headers="Connection: close\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    request = Request(time.perf_counter())
    writer.write(sent)
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        chunk = json.loads(line[6:])
        for choice in chunk["choices"]:
            request.tokens += [now] * len(choice["token_ids"])
        if chunk.get("usage"):
            request.prompt_tokens = chunk["usage"]["prompt_tokens"]
    request.done = request.tokens[-1]
    writer.close()
    return request


async def load(port: int, concurrency: int, requests: int, prompt_words: int, max_tokens: int) -> list[Request]:
    """`requests` requests, `concurrency` at a time."""
    queue = list(range(requests))
    done: list[Request] = []

    async def worker() -> None:
        while queue:
            number = queue.pop()
            prompt = " ".join([str(number), *(WORDS[(number + i) % len(WORDS)] for i in range(prompt_words))])
            done.append(await one(port, prompt, max_tokens))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done


def scrape(port: int) -> dict[str, float]:
    """Sums over replicas of the server's figures."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("snapmla:") + (f"|{sample.labels['le']}" if "le" in sample.labels else "")
            found[name] = found.get(name, 0.0) + sample.value
    return found


def cpu_seconds(path: Path) -> float:
    fields = (path / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def transport_seconds(launched: Launched) -> float:
    """CPU time of the front end process, and of the workers' socket threads."""
    workers = [pid for pid in launched.tree() if "RANK" in environment(pid) and pid != launched.front_end()]
    threads = [task for pid in workers for task in Path(f"/proc/{pid}/task").iterdir()]
    sockets = [task for task in threads if (task / "comm").read_text().startswith("ZMQ")]
    return cpu_seconds(Path(f"/proc/{launched.front_end()}")) + sum(map(cpu_seconds, sockets))


def quantile_ms(delta: dict[str, float], name: str, part: float) -> float:
    """Upper bound of the bucket that holds a quantile, in milliseconds."""
    buckets = sorted((float(key.partition("|")[2]), count) for key, count in delta.items() if key.startswith(f"{name}_bucket|"))
    return next((1000 * bound for bound, count in buckets if count >= part * buckets[-1][1]), float("inf"))


def compare(delta: dict[str, float], done: list[Request]) -> dict[str, object]:
    """Counts of both sides, and how far the server's mean latencies are from the client's."""
    output_tokens = sum(len(request.tokens) for request in done)
    client = {
        "e2e_request_latency_seconds": statistics.fmean(r.done - r.sent for r in done),
        "time_to_first_token_seconds": statistics.fmean(r.tokens[0] - r.sent for r in done),
        "inter_token_latency_seconds": sum(r.tokens[-1] - r.tokens[0] for r in done) / (output_tokens - len(done)),
    }
    server = {name: delta[f"{name}_sum"] / delta[f"{name}_count"] for name in client}
    return {
        "requests": [len(done), int(delta["request_success_total"])],
        "prompt_tokens": [sum(request.prompt_tokens for request in done), int(delta["prompt_tokens_total"])],
        "output_tokens": [output_tokens, int(delta["generation_tokens_total"])],
        "mean_difference_percent": {name: 100 * (server[name] / client[name] - 1) for name in client},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS / "serving.jsonl")
    parser.add_argument("engine", nargs="*", help="options of engine.launch, after --")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    with Launched(PYTHON, "--no-access-log", *args.engine, log=folder / "log") as launched:
        launched.wait_ready()
        shape = (args.prompt_words, args.max_tokens)
        asyncio.run(load(launched.port, args.concurrency, args.concurrency, *shape))  # warm
        before, cpu, began = scrape(launched.port), transport_seconds(launched), time.perf_counter()
        done = asyncio.run(load(launched.port, args.concurrency, args.requests, *shape))
        seconds, cpu = time.perf_counter() - began, transport_seconds(launched) - cpu
        after = scrape(launched.port)
    delta = {name: after[name] - before.get(name, 0.0) for name in after}
    tokens = sum(len(request.tokens) for request in done)
    result = {
        **{name: value for name, value in vars(args).items() if name != "output"},
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "ttft_ms": percentiles(r.tokens[0] - r.sent for r in done),
        "itl_ms": percentiles(b - a for r in done for a, b in zip(r.tokens, r.tokens[1:])),
        "e2e_ms": percentiles(r.done - r.sent for r in done),
        "front_end_and_transport_cpu_us_per_token": 1e6 * cpu / tokens,
        "step_share_outside_model": 1 - delta["engine_model_seconds_total"] / delta["engine_step_seconds_total"],
        "delivery_ms": {f"p{p}": quantile_ms(delta, "frontend_delivery_seconds", p / 100) for p in (50, 90, 99)},
        "client_and_server": compare(delta, done),
        "cores": len(os.sched_getaffinity(0)),
        "machine": machine_state("cuda" if torch.cuda.is_available() and "cpu" not in args.engine else "cpu"),
    }
    print(json.dumps(result, indent=1))
    append(args.output, result)


if __name__ == "__main__":
    main()
