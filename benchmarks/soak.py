"""Mixed traffic for as long as you like, every answer checked: `python -m benchmarks.soak --minutes 20`.

Short and long prompts, shared prefixes, several choices, stop strings, sampling with seeds, structured output, streams and
whole answers, and clients that leave half way; two replicas with so little cache that sequences are preempted. Expected
texts come from an offline run with the same parameters (FP32 and the exact cache, so they are equal). At the end no block,
file descriptor or memory may be lost. Appends one JSON line to results/soak.jsonl; the exit status says whether all is well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.records import RESULTS, append, machine_state
from benchmarks.serving import WORDS, scrape
from engine.hub import resolve_model
from engine.llm import LLM
from engine.openai_types import CompletionRequest, parse_request
from engine.served_model import ServedModel
from tests.distributed.launched import PYTHON, Launched

MAX_MODEL_LEN = 384
OPTIONS = (
    "--dp", "2", "--dtype", "float32", "--cache-format", "fp32", "--max-model-len", str(MAX_MODEL_LEN),
    "--num-cache-blocks", "9", "--max-num-batched-tokens", "128", "--no-access-log",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"], "additionalProperties": False}
CONCURRENCY = 12
ABORTED = 0.15
WARM_S = 90.0


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests with one right answer each."""
    rng = random.Random(11)
    shared = " ".join(rng.choice(WORDS) for _ in range(70))
    found = []
    for number in range(count):
        words = [rng.choice(WORDS) for _ in range(rng.choice([2, 6, 20, 80]))]
        body: dict[str, Any] = {
            "prompt": " ".join([*([shared] if rng.random() < 0.4 else []), *words]),
            "max_tokens": rng.choice([1, 5, 16, 40]),
            "seed": number,
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 0.9]),
        }
        kind = number % 6
        if kind == 1:
            body |= {"n": 3, "temperature": 0.9}
        elif kind == 2:
            body |= {"stop": [" the", "."], "max_tokens": 40}
        elif kind == 3:
            body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
        elif kind == 4:
            body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 1, "top_k": 40}
        found.append(body)
    return found


def offline(requests: list[dict[str, Any]]) -> list[list[str]]:
    """Texts of every request's choices, from the engine in this process."""
    model = ServedModel.load(resolve_model("demo"), name="demo", max_model_len=MAX_MODEL_LEN)
    llm = LLM("demo", dtype="float32", cache_format="fp32", max_model_len=MAX_MODEL_LEN, num_cache_blocks=256)
    works = [model.completion(parse_request(CompletionRequest, dict(body))) for body in requests]
    results = llm.generate([work.prompts[0].token_ids for work in works], [work.params for work in works], use_tqdm=False)
    return [[choice.text for choice in result.outputs] for result in results]


class Soak:
    """Clients of one launch and what they saw."""

    def __init__(self, port: int, requests: list[dict[str, Any]], expected: list[list[str]], until: float) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._requests, self._expected, self._until = requests, expected, until
        self.seen: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []

    async def client(self, number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(timeout=600) as http:
            while time.monotonic() < self._until:
                index = rng.randrange(len(self._requests))
                if rng.random() < ABORTED:
                    await self._leave(http, self._requests[index], rng.randrange(3))
                    continue
                streaming = rng.random() < 0.5
                texts = await (self._stream if streaming else self._whole)(http, self._requests[index])
                self.seen["stream" if streaming else "whole"] += 1
                if texts != self._expected[index]:
                    self.wrong.append({"request": self._requests[index], "got": texts, "expected": self._expected[index]})

    async def _whole(self, http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
        response = await http.post(self._url, json=body)
        response.raise_for_status()
        return [choice["text"] for choice in response.json()["choices"]]

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
        texts = [""] * body.get("n", 1)
        async with http.stream("POST", self._url, json=body | {"stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["text"]
        return texts

    async def _leave(self, http: httpx.AsyncClient, body: dict[str, Any], chunks: int) -> None:
        """Disconnect before the first chunk or after a few."""
        self.seen["left"] += 1
        if chunks == 0:
            try:
                await asyncio.wait_for(http.post(self._url, json=body), 0.05)
            except TimeoutError:
                return
        async with http.stream("POST", self._url, json=body | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                chunks -= 1
                if chunks <= 0:
                    return


def footprint(launched: Launched) -> dict[str, dict[str, float]]:
    """Resident MiB and open descriptors of each process of the tree, by role."""
    found = {}
    for number, pid in enumerate(sorted(launched.tree())):
        status = Path(f"/proc/{pid}/status").read_text()
        resident = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))
        found[f"process {number}"] = {"mib": round(resident, 1), "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}
    return found


def settled(port: int) -> dict[str, float]:
    """Metrics once nothing is open."""
    for _ in range(600):
        figures = scrape(port)
        if not figures["open_requests"] and not figures["num_requests_running"]:
            return figures
        time.sleep(0.1)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=90, help="different requests")
    args = parser.parse_args()
    requests = bodies(args.requests)
    expected = offline(requests)
    log = Path(tempfile.mkdtemp()) / "log"
    with Launched(PYTHON, *OPTIONS, log=log) as launched:
        launched.wait_ready()

        async def traffic(seconds: float, first: int) -> Soak:
            soak = Soak(launched.port, requests, expected, time.monotonic() + seconds)
            await asyncio.gather(*(soak.client(first + number) for number in range(CONCURRENCY)))
            return soak

        warm = asyncio.run(traffic(min(WARM_S, args.minutes * 12), 1000))
        settled(launched.port)
        before = footprint(launched)
        soak = asyncio.run(traffic(args.minutes * 60, 0))
        figures = settled(launched.port)
        after = footprint(launched)
    used = figures["cache_blocks"] - figures["cache_blocks_free"] - figures["cache_blocks_reusable"]
    grown = {name: after[name]["mib"] - before[name]["mib"] for name in before}
    lost = {name: after[name]["descriptors"] - before[name]["descriptors"] for name in before}
    leaks = [line for line in log.read_text().splitlines() if "cache leak" in line]
    wrong = warm.wrong + soak.wrong
    healthy = not wrong and used == 0 and not leaks and max(grown.values()) < 48 and max(lost.values()) <= 0
    result = {
        "minutes": args.minutes,
        "seen": dict(soak.seen),
        "output_tokens": figures["generation_tokens_total"],
        "preemptions": figures["num_preemptions_total"],
        "prefix_hits": figures["prefix_cache_hits_total"],
        "wrong": len(wrong),
        "blocks_left": used,
        "mib_grown": grown,
        "descriptors_grown": lost,
        "healthy": healthy,
        "machine": machine_state("cpu"),
    }
    print(json.dumps(result, indent=1))
    for entry in wrong[:5]:
        print(json.dumps(entry))
    append(RESULTS / "soak.jsonl", result)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
