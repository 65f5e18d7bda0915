"""One host with eight (or four, or two) GPUs: every run that needs them, in one script: `python -m benchmarks.eight_gpus`.

links    NCCL over all ranks: right sums, times of the engine's collectives, the links between the devices; the pre-flight
answers  `torchrun -m engine.launch --dp 4 --tp 2`, and the same with tp 1, with the demo model: 50 prompts, same tokens as one process
kill     one worker killed under load: the clients hear of it, every process ends
shapes   DeepSeek-V3.1 and LongCat-Flash with dummy weights over all ranks, beside one simulated rank of the same case
http     request rates at one replica a GPU: time to first token, between tokens, whole requests; balance of the replicas
figure   tokens/s per GPU, real beside simulated

Each finding is a line of results/eight_gpus.jsonl (steps of `shapes`: results/eight_gpus_decode.jsonl), and what has its line
for this device, revision and number of ranks is skipped: a run that was stopped (by a signal, a time limit) goes on when it is
started again with the same --folder. What fails - a part, a layout, a deployment, one case of it - stops nothing else: ranks
that a case has ended are started again without it, and ranks that say nothing for SILENT_S are ended. Everything should take
about 20 minutes on eight H200s, half of it the shapes; no weights are read and nothing is written but lines, logs and figures.

NVLink multicast stays off: NCCL_NVLS_ENABLE=0 holds in every process, and what NCCL says of it is kept with the links.
`--device cpu` runs all parts over gloo, in tiny sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import functools
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import deployments, serving
from benchmarks.engine_on_gpu import ask, ask_all, compare, noise_of_batching, prompts
from benchmarks.harness import eager, run_parts
from benchmarks.records import RESULTS, read
from benchmarks.several_gpus import Run, Sizes, each
from engine.llm import LLM
from engine.preflight import check_all_reduce, choose_device
from models.parallel import ParallelContext
from tests.comparator import Differences, Generation

MULTICAST = "NCCL_NVLS_ENABLE"
END_S = 30.0


# ---- links


def links(run: Run) -> None:
    if run.has(part="links"):
        return
    sizes = run.sizes
    with tempfile.TemporaryDirectory() as said:
        told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NVLS,ENV", "NCCL_DEBUG_FILE": f"{said}/%p"}
        out = run.torchrun(
            "links", "benchmarks.eight_gpus", "--links-rank", "--device", run.device, "--row-width", str(sizes.row_width),
            "--rows", *map(str, sizes.rows), environment=told,
        )  # fmt: skip
        multicast = multicast_lines(path.read_text(errors="replace") for path in Path(said).iterdir())
    found = json.loads(next(line for line in out.splitlines() if line.startswith('{"collectives"')))
    report = ""
    if run.device == "cuda":
        report = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout
    run.write(part="links", **found, multicast=multicast, report=report)


def multicast_lines(logs: Iterable[str]) -> dict[str, int]:
    """What NCCL's ranks said of NVLink multicast, without places and numbers, and how often."""
    lines = (line.partition("NCCL INFO ")[2] for log in logs for line in log.splitlines() if "NVLS" in line)
    return dict(Counter(re.sub(r"\d+|0x[0-9a-f]+", "#", line) for line in lines))


def links_rank(device_name: str, rows: list[int], width: int) -> None:
    """One rank of `links`; rank 0 prints the line."""
    device = choose_device(device_name, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    check_all_reduce(device)  # the engine's own pre-flight
    world = dist.get_world_size()
    parallel = ParallelContext.create(world, 1, device)
    everyone = ParallelContext.create(1, world, device)
    times: dict[str, dict[int, float]] = {"tp_all_reduce": {}, "ep_all_gather": {}, "ep_reduce_scatter": {}}
    for count in rows:
        x = torch.full((count, width), float(parallel.rank + 1), device=device, dtype=torch.bfloat16)
        total = world * (world + 1) / 2
        gathered = parallel.ep_all_gather(x)
        assert gathered.view(world, count, width)[:, 0, 0].tolist() == [rank + 1.0 for rank in range(world)]
        assert bool((parallel.ep_reduce_scatter(gathered) == (parallel.rank + 1.0) * world).all())
        assert bool((everyone.tp_all_reduce(x.clone()) == total).all())
        calls = {
            "tp_all_reduce": lambda x=x: everyone.tp_all_reduce(x.clone()),
            "ep_all_gather": lambda x=x: parallel.ep_all_gather(x),
            "ep_reduce_scatter": lambda g=gathered: parallel.ep_reduce_scatter(g),
        }
        for name, call in calls.items():
            times[name][count] = _rank_us(call, device)
    if dist.get_rank() == 0:
        print(json.dumps({"collectives": times, "row_width": width, MULTICAST: os.environ.get(MULTICAST)}), flush=True)
    dist.destroy_process_group()


def _rank_us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a call, launched one after another; the same count on all ranks."""
    if device.type == "cuda":
        return statistics.median(eager([call] * 20) for _ in range(5))
    start = time.perf_counter()
    for _ in range(3):
        call()
    return 1e6 * (time.perf_counter() - start) / 3


# ---- answers, kill


def expected(device: str, texts: list[str], num_tokens: int) -> tuple[list[Generation], Differences]:
    """Greedy answers of one process to all texts, and how far they move when each is asked alone."""
    options: dict[str, Any] = {"cache_memory_bytes": 2 << 30}
    if device == "cpu":
        options = {"cache_memory_bytes": 1 << 30, "max_model_len": 2048, "dtype": "float32", "cache_format": "fp32"}
    return noise_of_batching(LLM("demo", device=device, **options), texts, num_tokens)


def answers(run: Run) -> None:
    layouts = list(dict.fromkeys([(run.world // 2, 2), (run.world, 1)]))
    todo = [(dp, tp) for dp, tp in layouts if not run.has(part="answers", dp=dp, tp=tp)]
    if not todo:
        return
    texts, num_tokens = prompts(run.sizes.prompts), run.sizes.tokens
    # A process of its own: when it ends, the ranks have the whole device.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        want, noise = process.submit(expected, run.device, texts, num_tokens).result()

    def layout(dp: int, tp: int) -> None:
        with run.launch(dp, tp, f"answers_dp{dp}_tp{tp}") as launched:
            launched.wait_ready()
            ask(launched.port, texts[0], num_tokens)
            start = time.perf_counter()
            got = ask_all(launched.port, texts, num_tokens)
            seconds = time.perf_counter() - start
            launched.process.send_signal(signal.SIGTERM)
            launched.wait(END_S)
        found = compare(got, want, noise, f"{dp}x{tp}")
        run.write(part="answers", dp=dp, tp=tp, **found, tokens_per_s=num_tokens * len(texts) / seconds)

    each({f"answers {dp}x{tp}": functools.partial(layout, dp, tp) for dp, tp in todo})


def kill(run: Run) -> None:
    """Rank world - 1 gets SIGKILL while every replica answers."""
    if run.has(part="kill"):
        return
    with run.launch(run.world // 2, 2, "kill") as launched:
        launched.wait_ready()
        last: dict[int, dict[str, Any]] = {}
        started, broken = threading.Barrier(run.world + 1), threading.Barrier(run.world + 1)

        def client(number: int) -> None:
            for chunk in launched.stream(
                "/v1/completions", prompt=prompts(run.world)[number], max_tokens=1500, ignore_eos=True
            ):
                if number not in last:
                    last[number] = chunk
                    started.wait(240)
                last[number] = chunk
            broken.wait(240)

        for number in range(run.world):
            threading.Thread(target=client, args=(number,), daemon=True).start()
        started.wait(240)
        os.kill(launched.rank(run.world - 1), signal.SIGKILL)
        hit = time.monotonic()
        broken.wait(60)
        noticed = time.monotonic() - hit
        status = launched.wait(60)
        ended = time.monotonic() - hit
        while launched.left() and time.monotonic() - hit < 60:
            time.sleep(0.1)
        left = len(launched.left())
    told = sum("error" in chunk for chunk in last.values())
    assert told == run.world and status != 0 and not left, f"{told} of {run.world} told, status {status}, {left} processes left"
    run.write(
        part="kill", clients=run.world, told=told, noticed_s=noticed, ended_s=ended, exit_status=status, processes_left=left
    )


# ---- http


def http(run: Run) -> None:
    todo = [rate for rate in run.sizes.rates if not run.has(part="http", rate=rate)]
    if not todo:
        return
    with run.launch(run.world, 1, "http") as launched:
        launched.wait_ready()
        asyncio.run(serving.load(launched.port, run.world, run.world, 24, run.sizes.tokens))  # warm
        each({f"http at {rate:g}/s": functools.partial(load_at, run, launched.port, rate) for rate in todo})


def load_at(run: Run, port: int, rate: float) -> None:
    before, start = tokens_by_replica(port), time.perf_counter()
    done = asyncio.run(at_rate(port, rate, run.sizes.requests, run.sizes.tokens))
    seconds = time.perf_counter() - start
    after = tokens_by_replica(port)
    made = [after[replica] - before.get(replica, 0.0) for replica in sorted(after)]
    run.write(
        part="http", rate=rate, requests=len(done), seconds=seconds,
        output_tokens_per_s=sum(len(r.tokens) for r in done) / seconds,
        ttft_ms=serving.percentiles(r.tokens[0] - r.sent for r in done),
        itl_ms=serving.percentiles(b - a for r in done for a, b in zip(r.tokens, r.tokens[1:])),
        e2e_ms=serving.percentiles(r.done - r.sent for r in done),
        tokens_by_replica=made, least_over_mean=min(made) / statistics.fmean(made),
    )  # fmt: skip


async def at_rate(port: int, rate: float, requests: int, max_tokens: int) -> list[serving.Request]:
    """`requests` streams, one begun every 1 / rate seconds whatever has become of the earlier ones."""
    texts, tasks = prompts(requests), []
    for text in texts:
        tasks.append(asyncio.create_task(serving.one(port, text, max_tokens)))
        await asyncio.sleep(1.0 / rate)
    return await asyncio.gather(*tasks)


def tokens_by_replica(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {s.labels["engine"]: s.value for s in samples if s.name == "snapmla:generation_tokens_total"}


# ---- figure


def figure(run: Run) -> None:
    """Tokens/s per GPU over the context, one panel a deployment: what ran, and beside it what one simulated rank said."""
    from benchmarks.figure_style import Folders, origin
    from benchmarks.plot_speed import throughput

    paired = {tuple(pair[name] for name in deployments.PAIRED) for pair in deployments.pairs(run.decode_results)}
    lines = [line for line in read(run.decode_results) if tuple(line.get(name) for name in deployments.PAIRED) in paired]
    if not lines:
        print("figure: no case ran both really and simulated")
        return
    drawn = throughput(lines, f"Decoding throughput on {run.world} ranks, and as one simulated rank predicts it")
    folders = Folders(run.folder, RESULTS.parent / "figures" if run.device == "cuda" else run.folder)
    folders.save(drawn, f"throughput_of_{run.world}_gpus", origin(lines))


PARTS = {"links": links, "answers": answers, "kill": kill, "shapes": deployments.measure, "http": http, "figure": figure}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run of everything over gloo, tiny sizes"
    )
    parser.add_argument(
        "--world", type=int, default=0, metavar="N", help="ranks (default: 8, 4 or 2, as there are GPUs; 8 on a CPU)"
    )
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the results")
    parser.add_argument("--links-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--row-width", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if os.environ.setdefault(MULTICAST, "0") != "0":
        parser.error(f"{MULTICAST} is {os.environ[MULTICAST]!r}, but NVLink multicast must stay off; unset it or make it 0")
    if args.links_rank:
        links_rank(args.device, args.rows, args.row_width)
        return 0
    present = torch.cuda.device_count() if args.device == "cuda" else 8
    world = args.world or next((n for n in (8, 4) if n <= present), 2)
    if world > present or world % 2:
        parser.error(f"--world: {world} ranks need as many GPUs and must be even; {present} are here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a time limit's: what was launched must end as well
    run = Run(world, args.device, Sizes.of(world, args.device), args.folder)
    return int(not run_parts({name: functools.partial(PARTS[name], run) for name in args.parts}))


if __name__ == "__main__":
    sys.exit(main())
