"""Speculation with the models' own draft heads: equal tokens, acceptance, speed. One JSON line per finding.

    python -m benchmarks.mtp equality                       # 200 requests, k = 1..3 against k = 0, demo and reference models
    python -m benchmarks.mtp acceptance                     # held-out text, by position, at temperature 0, 0.7 and 1
    python -m benchmarks.mtp speed --device cuda            # against k = 0 at batch 1, 8, 64; adaptive depth up to 256

equality  Requests of mixed lengths and arrivals, greedy and seeded, two of them parting right behind a block border, with
          prefix cache, chunked prefill and preemption, synchronous and asynchronous, against k = 0 without any of these. On a
          CPU in FP32 with the exact cache and every sampling parameter: all tokens equal, with the head's own drafts (a random
          model accepts next to none) and with those of an oracle that is wrong at every fifth position. On CUDA, eager and with graphs, with
          the BF16 cache: equal up to rounding (tests/comparator.py), whose noise is that of k = 0 with and without the features.
          A seeded draw is the best of log probability times temperature-free noise, so it is compared as greedy tokens are,
          after the noise is added.
acceptance, speed   LLM with the demo model and its FP8 cache; texts are those of demo_model/heldout.jsonl, max_tokens
          exact and end tokens ignored. Tokens are counted by the engine. Engines take turns, medians count. ms_per_step is wall
          time, device_ms that of the device; drafted: the part of all steps of sequences that verified drafts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine_on_gpu import prompts
from benchmarks.records import RESULTS, Records
from engine.hub import resolve_model
from engine.llm import LLM
from engine.messages import ReplicaStats
from engine.sampling_params import SamplingParams
from kernels.reference.sampling import gumbel_noise
from models.config import load_model_config
from tests.comparator import Differences, Generation, assert_same_generations
from tests.engine.speculation import Outcome, Requests, assert_equal, border_pair, engine, oracle, run, workload
from tests.reference_checkpoints import reference_checkpoint

MODELS = ("demo", "deepseek_v3-tiny", "longcat_flash-tiny")
ARRIVALS = (1, 3, 0, 12, 0, 5, 24, 0)
FEATURES = {"max_num_batched_tokens": 256, "prefill_chunk": 64, "max_num_seqs": 32, "num_cache_blocks": 26}
SEED = 11
TURNS = 3
SMALL = 64  # batches beyond it only compare no drafts, all drafts and adaptive depth
WARM_SECONDS = {"cuda": 3.0, "cpu": 0.0}


def per_position(after: ReplicaStats, before: ReplicaStats | None = None) -> dict[str, Any]:
    """Part of the verified sequences whose drafts were accepted up to each position, and tokens per sequence and step."""
    before = before or ReplicaStats(spec_accepted_per_pos=[0] * len(after.spec_accepted_per_pos))
    drafts = max(after.spec_drafts - before.spec_drafts, 1)
    accepted = [(a - b) / drafts for a, b in zip(after.spec_accepted_per_pos, before.spec_accepted_per_pos)]
    return {"accepted_per_pos": [round(part, 3) for part in accepted], "tokens_per_step": round(1 + sum(accepted), 3)}


# ---- equality


def equality(records: Records, options: argparse.Namespace) -> None:
    failed = False
    for name in options.models:
        folder = str(reference_checkpoint(name) if "-" in name and not Path(name).exists() else resolve_model(name))
        check = equal_exactly if options.exact or options.device == "cpu" else equal_up_to_rounding
        preemptions = hits = 0
        for found in check(folder, options):
            preemptions, hits = preemptions + found["preemptions"], hits + found["prefix_hit_tokens"]
            failed |= "failed" in found
            records.write(part="equality", model=Path(name).name, where=options.device, **found)
            print(json.dumps(found), flush=True)
        if options.steps != "eager":  # of one run alone the first may well be missing
            assert preemptions and hits, "nothing was preempted, or nothing found in the prefix cache"
    if failed:
        raise SystemExit("tokens differ by more than rounding explains")


def equal_exactly(folder: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """FP32 and the exact cache, for which only the reference operations have a form on CUDA."""
    requests = workload(seed=3, count=options.prompts, vocab_size=load_model_config(Path(folder)).vocab_size)
    exact: dict[str, Any] = {"device": options.device, "kernels": "reference"}
    want = run(engine(folder, 0, prefix_cache=False, **exact), requests, [32])
    tokens = sum(len(outcome.token_ids) for outcome in want.values())
    accepts = False  # whether the head's own drafts are accepted often enough to show anything
    for depth in (0, *options.depths):
        for asynchronous in (False, True):
            drafts = "oracle" if asynchronous and depth and not accepts else "head"
            started = time.perf_counter()
            core = engine(folder, depth, asynchronous=asynchronous, **FEATURES, **exact)
            if drafts == "oracle":
                oracle(core, requests, want, wrong_every=5)
            got = run(core, requests, ARRIVALS)
            assert_equal(got, want, requests)
            stats = core.stats()
            accepts = accepts or (drafts == "head" and 5 * sum(stats.spec_accepted_per_pos) > stats.spec_draft_tokens)
            yield {
                "exact": True, "depth": depth, "asynchronous": asynchronous, "drafts": drafts, "prompts": len(requests), "tokens": tokens, "tokens_equal": tokens,
                **_features_seen(stats), "seconds": round(time.perf_counter() - started, 1),
            }  # fmt: skip


def equal_up_to_rounding(folder: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    vocab_size = load_model_config(Path(folder)).vocab_size
    requests = unfiltered(workload(seed=3, count=options.prompts, vocab_size=vocab_size))
    # The BF16 cache rounds a token alike whatever the chunk, which the FP8 cache does not.
    rounded: dict[str, Any] = {"device": options.device, "dtype": "bfloat16", "cache_format": "bf16"}
    started = time.perf_counter()
    plain = engine(folder, 0, prefix_cache=False, max_num_seqs=64, num_cache_blocks=800, **rounded)
    want = scored(run(plain, requests, [64]), requests, vocab_size)
    control = run(engine(folder, 0, asynchronous=True, **FEATURES, **rounded), requests, ARRIVALS)
    noise = Differences.between(scored(control, requests, vocab_size), want)
    print(f"k = 0 with and without the features: {time.perf_counter() - started:.1f} s", flush=True)
    for depth in options.depths:
        both = [True, False] if depth == options.depths[-1] else [True]  # eager steps take long
        for graphs in {"graphs": [True], "eager": [False]}.get(options.steps, both):
            started = time.perf_counter()
            core = engine(folder, depth, asynchronous=graphs, cuda_graphs=graphs, **FEATURES, **rounded)
            got = scored(run(core, requests, ARRIVALS), requests, vocab_size)
            _share_first_difference(got, want)
            found: dict[str, Any] = {
                "exact": False, "depth": depth, "asynchronous": graphs, "cuda_graphs": graphs, "prompts": len(requests),
                "tokens": sum(len(generation.token_ids) for generation in want),
                "prompts_equal": sum(a.token_ids == b.token_ids for a, b in zip(got, want)),
                "noise_p99": round(noise.p99, 4), "noise_largest": round(noise.largest, 4), **_features_seen(core.stats()),
            }  # fmt: skip
            try:
                differences, equal = assert_same_generations(got, want, noise, f"k = {depth}: ")
                found |= {"tokens_equal": equal, "p99": round(differences.p99, 4), "largest": round(differences.largest, 4)}
            except AssertionError as error:  # the other depths are worth knowing all the same
                found["failed"] = str(error)[:400]
            yield found | {"seconds": round(time.perf_counter() - started, 1)}
            del core


def _features_seen(stats: ReplicaStats) -> dict[str, Any]:
    """What the features did."""
    return {
        "preemptions": stats.num_preemptions,
        "prefix_hit_tokens": stats.prefix_hits,
        "steps": stats.num_steps,
        **per_position(stats),
    }


def unfiltered(requests: Requests) -> Requests:
    """Greedy requests and draws at two temperatures, all with log probabilities: what rounding moves by little."""
    changed: Requests = {}
    for index, (name, (prompt, params)) in enumerate(requests.items()):
        temperature = (0.0, 0.8, 1.0)[index % 3]
        changed[name] = (
            prompt,
            SamplingParams(temperature=temperature, max_tokens=params.max_tokens, ignore_eos=True, seed=index, logprobs=2),
        )
    shared = list(requests["border a"][0][:128])
    return (
        changed
        | border_pair(shared, logprobs=2)
        | {f"{name}, seeded": request for name, request in border_pair(shared, logprobs=2, temperature=1.0, seed=5).items()}
    )


def scored(outcomes: dict[str, Outcome], requests: Requests, vocab_size: int) -> list[Generation]:
    """Continuations whose log probabilities carry the noise of the request's draws, so that the best one is what was drawn."""
    found = []
    for name, outcome in outcomes.items():
        prompt, params = requests[name]
        entries = [{entry.token_id: entry.logprob, **dict(entry.top)} for entry in outcome.logprobs]
        if not params.greedy:
            positions = torch.arange(len(entries)) + len(prompt)
            noise = gumbel_noise(torch.full_like(positions, params.seed or 0), positions, vocab_size) * params.temperature
            entries = [
                {token: value + float(row[token]) for token, value in entry.items()} for entry, row in zip(entries, noise)
            ]
        found.append(Generation(outcome.token_ids, entries))
    return found


def _share_first_difference(got: Sequence[Generation], want: Sequence[Generation]) -> None:
    """Let `want` know the score of the token that `got` drew in place of its own, if it was not among its best."""
    for mine, theirs in zip(got, want):
        for position, (a, b) in enumerate(zip(mine.token_ids, theirs.token_ids)):
            if a != b:
                theirs.logprobs[position].setdefault(a, mine.logprobs[position][a])
                break


# ---- acceptance and speed


class Way(NamedTuple):
    """How an engine speculates."""

    acceptance: str = "exact"
    depth: int = 0
    adaptive: bool = False


def llm(options: argparse.Namespace, way: Way, max_num_seqs: int = 64) -> LLM:
    more: dict[str, Any] = {}
    if way.depth:
        more = {"num_speculative_tokens": way.depth, "speculative_acceptance": way.acceptance}
        more["speculative_depth"] = "adaptive" if way.adaptive else "fixed"
    size = {"cuda": 2 << 30, "cpu": 96 << 20}[options.device]
    return LLM(options.models[0], device=options.device, cache_memory_bytes=size, max_num_seqs=max_num_seqs, **more)


def started(ways: Sequence[Way], options: argparse.Namespace) -> dict[Way, LLM]:
    """An engine for each way, and a device whose clocks are up."""
    servers = {way: llm(options, way, max(options.batches)) for way in ways}
    texts, until = prompts(options.batches[0]), time.perf_counter() + WARM_SECONDS[options.device]
    while time.perf_counter() < until:
        servers[ways[0]].generate(texts, _params(64, 0.0), use_tqdm=False)
    return servers


def acceptance(records: Records, options: argparse.Namespace) -> None:
    texts = prompts(options.prompts)
    for how in ("exact", "ratio"):
        for depth in options.depths:
            server = llm(options, Way(how, depth))
            for temperature in (0.0, 0.7, 1.0):
                before = server.stats()
                params = SamplingParams(temperature=temperature, max_tokens=options.tokens, ignore_eos=True, seed=SEED)
                server.generate(texts, params, use_tqdm=False)
                found = {"acceptance": how, "depth": depth, "temperature": temperature, **per_position(server.stats(), before)}
                records.write(part="acceptance", model=options.models[0], where=options.device, prompts=len(texts), **found)
                print(json.dumps(found), flush=True)


def speed(records: Records, options: argparse.Namespace) -> None:
    ways = [Way(), *(Way(how, depth) for how in ("exact", "ratio") for depth in options.depths)]
    deepest, adaptive = Way(depth=options.depths[-1]), Way(depth=options.depths[-1], adaptive=True)
    servers = started([*ways, adaptive], options)
    for temperature, batch in [(t, b) for t in (0.0, 1.0) for b in options.batches if t or b <= SMALL]:
        if batch > SMALL:
            raced = [Way(), deepest, adaptive]
        else:
            raced = list(servers) if temperature else [way for way in ways if way.acceptance == "exact"]  # ratio is the same
        for way, found in race({way: servers[way] for way in raced}, batch, temperature, options).items():
            found = {"temperature": temperature, "batch": batch, **way._asdict(), **found}
            records.write(part="speed", model=options.models[0], where=options.device, **found)
            print(json.dumps(found), flush=True)


def race(servers: Mapping[Way, LLM], batch: int, temperature: float, options: argparse.Namespace) -> dict[Way, dict[str, Any]]:
    """Each server's median rate on a batch, and how many times that of the first. They take turns, so that a change of clocks
    or of the machine's load meets them all."""
    texts = prompts(batch)
    for way, server in servers.items():
        # The second run finds its prompts in the prefix cache, whose kernels must be compiled too; adaptive depth times both ways.
        for count in (8, 96 if way.adaptive else 8):
            server.generate(texts, _params(count, temperature), use_tqdm=False)
    runs = [{way: timed(server, texts, temperature, options.tokens) for way, server in servers.items()} for _ in range(TURNS)]
    found = {way: sorted((turn[way] for turn in runs), key=lambda run: run["tokens_per_s"])[TURNS // 2] for way in servers}
    first = next(iter(found.values()))["tokens_per_s"]
    return {way: {"speed_up": round(run["tokens_per_s"] / first, 3), **run} for way, run in found.items()}


def timed(server: LLM, texts: Sequence[str], temperature: float, num_tokens: int) -> dict[str, Any]:
    """Tokens per second of one batch, prefill left out: the difference of a long and a short run."""
    seconds: list[float] = []
    stats = [server.stats()]
    for count in (16, 16 + num_tokens):
        started = time.perf_counter()
        server.generate(texts, _params(count, temperature), use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        stats.append(server.stats())
    wall = seconds[1] - seconds[0]
    start, short, long = stats
    steps = (long.num_steps - short.num_steps) - (short.num_steps - start.num_steps)
    device = (long.model_seconds - short.model_seconds) - (short.model_seconds - start.model_seconds)
    drafted = (long.spec_drafts - short.spec_drafts) / (len(texts) * (long.num_steps - short.num_steps))
    return {
        "tokens_per_s": round(len(texts) * num_tokens / wall, 1), "steps": steps, "ms_per_step": round(1e3 * wall / steps, 3),
        "device_ms": round(1e3 * device / steps, 3), "drafted": round(drafted, 2), **per_position(long, short),
    }  # fmt: skip


def _params(count: int, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=SEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("equality", "acceptance", "speed"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--exact", action="store_true", help="equality on CUDA in FP32 with the reference operations, eager")
    parser.add_argument("--models", nargs="+", default=None, help="demo, a folder, or the name of a reference checkpoint")
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", choices=("graphs", "eager"), help="of equality on CUDA (default: both at the last depth)")
    parser.add_argument("--prompts", type=int, default=None, help="(default: 200 for equality, 48 for acceptance)")
    parser.add_argument("--tokens", type=int, default=None, help="per prompt (default: 64 for acceptance, else 192)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--output", type=Path, default=RESULTS / "mtp.jsonl")
    options = parser.parse_args()
    options.models = options.models or (MODELS if options.part == "equality" else ["demo"])
    options.prompts = options.prompts or (200 if options.part == "equality" else 48)
    options.tokens = options.tokens or (64 if options.part == "acceptance" else 192)
    records = Records(options.output, device=options.device, method=f"benchmarks.mtp {options.part}", seed=SEED)
    {"equality": equality, "acceptance": acceptance, "speed": speed}[options.part](records, options)


if __name__ == "__main__":
    main()
