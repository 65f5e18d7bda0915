"""One host with eight (or four, or two) GPUs: every run that needs them, in one script: `python -m benchmarks.eight_gpus`.

links    NCCL over all ranks: right sums, times of the engine's collectives, the links between the devices; the pre-flight
answers  `torchrun -m engine.launch --dp 4 --tp 2`, and the same with tp 1, with the demo model: 50 prompts, same tokens as one process
kill     one worker killed under load: the clients hear of it, every process ends
shapes   DeepSeek-V3.1 and LongCat-Flash with dummy weights over all ranks, beside one simulated rank of the same case
http     request rates at one replica a GPU: time to first token, between tokens, whole requests; balance of the replicas
figure   tokens/s per GPU, real beside simulated

Each finding is a line of results/eight_gpus.jsonl (steps of `shapes`: results/eight_gpus_decode.jsonl), and what has its line
for this device, revision and number of ranks is skipped: a run that was stopped goes on. A part that fails does not stop the
others. NVLink multicast stays off: NCCL_NVLS_ENABLE=0 holds in every process. `--device cpu` runs all parts over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import decode, serving
from benchmarks.engine_on_gpu import ask, ask_all, compare, noise_of_batching, prompts
from benchmarks.harness import eager, run_parts
from benchmarks.records import RESULTS, ROOT, Records, newest, read
from benchmarks.workloads import SHAPES, cut_layers, tiny_shape
from engine.llm import LLM
from engine.preflight import check_all_reduce, choose_device
from models.config import load_model_config
from models.parallel import ParallelContext
from tests.comparator import Differences, Generation
from tests.distributed.launched import Launched, torchrun

PARTS = ("links", "answers", "kill", "shapes", "http", "figure")
MULTICAST = "NCCL_NVLS_ENABLE"
PUBLISHED_RANKS = 8  # the published shapes fill eight devices; fewer ranks take fewer layers of them
END_S = 30.0
PAIRED = ("shape", "dp", "tp", "format", "context", "batch")  # what a case and its simulation have in common


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a run asks for; `tiny` is for a dry run on a CPU."""

    prompts: int = 50
    tokens: int = 64
    rows: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    row_width: int = 7168
    rates: tuple[float, ...] = (4.0, 16.0, 64.0, 128.0)
    requests: int = 256
    contexts: tuple[int, ...] = decode.CONTEXTS
    shapes: tuple[str, ...] = ("deepseek_v3.1", "longcat_flash")
    engine: tuple[str, ...] = ("--cache-memory-bytes", str(2 << 30))
    decode: tuple[str, ...] = ()

    @staticmethod
    def of(world: int, device: str) -> Sizes:
        if device == "cpu":
            return Sizes.tiny()
        if world >= 4:
            return Sizes()
        # Two GPUs answer how far the simulation is off; they say nothing of Figure 1, so few cases do.
        return Sizes(
            contexts=(16384, 65536), shapes=("deepseek_v3.1",), rates=(16.0, 64.0), decode=("--batches", "--most", "32")
        )

    @staticmethod
    def tiny() -> Sizes:
        return Sizes(
            prompts=4, tokens=8, rows=(1, 3), row_width=64, rates=(2.0,), requests=4, contexts=(256,), shapes=("deepseek_v3.1",),
            engine=("--num-cache-blocks", "128", "--max-model-len", "2048", "--dtype", "float32", "--cache-format", "fp32"),
            decode=("--device", "cpu", "--cache-memory-bytes", str(4 << 20), "--batches", "2", "--most", "3"),
        )  # fmt: skip


class Run:
    """One execution of the script. world: ranks; a line counts as done for this device, revision and world."""

    def __init__(self, world: int, device: str, sizes: Sizes, folder: Path) -> None:
        self.world, self.device, self.sizes, self.folder = world, device, sizes, folder
        self.decode_results = folder / "eight_gpus_decode.jsonl"
        self.records = Records(folder / "eight_gpus.jsonl", device=device, method=__doc__.partition("\n")[0], seed=0)

    def has(self, **key: Any) -> bool:
        state = self.records.state
        return self.records.has(**key, world=self.world, device=state["device"], git=state["git"])

    def write(self, **fields: Any) -> None:
        self.records.write(figure="eight_gpus", world=self.world, **fields)
        print(json.dumps({name: value for name, value in fields.items() if name != "report"}), flush=True)

    def launch(self, dp: int, tp: int, log: Path) -> Launched:
        """The user's own command: torchrun starts one process, which supervises the workers."""
        device = ("--device", self.device)
        return Launched(torchrun(), "--dp", str(dp), "--tp", str(tp), "--no-access-log", *device, *self.sizes.engine, log=log)

    def torchrun(self, *module: str) -> str:
        """Output of a module on all ranks. Raises RuntimeError with its end when a rank fails."""
        command = [*torchrun()[:1], "--standalone", "--nproc-per-node", str(self.world), "-m", *module]
        return _output(command)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


# ---- links


def links(run: Run) -> None:
    if run.has(part="links"):
        return
    sizes = run.sizes
    out = run.torchrun(
        "benchmarks.eight_gpus", "--links-rank", "--device", run.device, "--row-width", str(sizes.row_width), "--rows", *map(str, sizes.rows)
    )  # fmt: skip
    found = json.loads(next(line for line in out.splitlines() if line.startswith('{"collectives"')))
    report = _output(["nvidia-smi", "topo", "-m"]) if run.device == "cuda" else ""
    run.write(part="links", **found, report=report)


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


def expected(run: Run, texts: list[str]) -> tuple[list[Generation], Differences]:
    """Greedy answers of one process to all texts, and how far they move when each is asked alone."""
    options: dict[str, Any] = {"cache_memory_bytes": 2 << 30}
    if run.device == "cpu":
        options = {"cache_memory_bytes": 1 << 30, "max_model_len": 2048, "dtype": "float32", "cache_format": "fp32"}
    engine = LLM("demo", device=run.device, **options)
    found = noise_of_batching(engine, texts, run.sizes.tokens)
    del engine
    decode.free_memory(torch.device(run.device))  # the ranks on this device need it
    return found


def answers(run: Run) -> None:
    worlds = list(dict.fromkeys([(run.world // 2, 2), (run.world, 1)]))
    todo = [(dp, tp) for dp, tp in worlds if not run.has(part="answers", dp=dp, tp=tp)]
    if not todo:
        return
    texts = prompts(run.sizes.prompts)
    want, noise = expected(run, texts)
    for dp, tp in todo:
        with run.launch(dp, tp, run.folder / "answers.log") as launched:
            launched.wait_ready()
            ask(launched.port, texts[0], run.sizes.tokens)
            start = time.perf_counter()
            got = ask_all(launched.port, texts, run.sizes.tokens)
            seconds = time.perf_counter() - start
            launched.process.send_signal(signal.SIGTERM)
            status = launched.wait(END_S)
        found = compare(got, want, noise, f"{dp}x{tp}")
        rate = run.sizes.tokens * len(texts) / seconds
        run.write(part="answers", dp=dp, tp=tp, **found, tokens_per_s=rate, exit_status=status)


def kill(run: Run) -> None:
    """Rank world - 1 gets SIGKILL while every replica answers."""
    if run.has(part="kill"):
        return
    with run.launch(run.world // 2, 2, run.folder / "kill.log") as launched:
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


# ---- shapes


def shapes(run: Run) -> None:
    """Real ranks of every deployment in turn, then each one's simulation, all of them at once on a device of their own."""
    for name in run.sizes.shapes:
        folder = shape_for(name, run.world, run.folder) if run.device == "cuda" else tiny_shape(run.folder)
        worlds = list(dict.fromkeys([(run.world, 1), (run.world // 2, 2), (1, run.world)]))
        cases = ["--shapes", str(folder), "--contexts", *map(str, run.sizes.contexts), *run.sizes.decode]
        output = ["--output", str(run.decode_results), "--worlds"]
        print(run.torchrun("benchmarks.decode", "--real", *cases, *output, *(f"dp={dp},tp={tp}" for dp, tp in worlds))[-4000:])
        predicted = []
        for device, (dp, tp) in enumerate(worlds):
            # The simulated rank gets the bytes of cache that the real ones had, so that batches are the same.
            held = [line for line in read(run.decode_results) if line["figure"] == "decode" and not line["simulated"]]
            held = [line for line in held if (line["shape"], line["dp"], line["tp"]) == (folder.name, dp, tp)]
            bytes_held = ["--cache-memory-bytes", str(held[-1]["cache_bytes"])]
            command = [sys.executable, "-m", "benchmarks.decode", *cases, *bytes_held, *output, f"dp={dp},tp={tp}"]
            predicted.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": str(device)}))
        ended = [process.wait() for process in predicted]
        if any(ended):
            raise RuntimeError(f"a simulation of {folder.name} failed")
    for pair in pairs(run.decode_results):
        key = {name: pair[name] for name in PAIRED}
        if not run.has(part="shapes", **key):
            run.write(part="shapes", **pair)


def shape_for(name: str, ranks: int, folder: Path) -> Path:
    """A published shape with so many of its layers that `ranks` devices hold what eight hold of the whole; its folder tells."""
    if ranks >= PUBLISHED_RANKS:
        return SHAPES / name
    return cut_layers(name, load_model_config(SHAPES / name).num_decoder_layers * ranks // PUBLISHED_RANKS, folder)


def pairs(path: Path) -> list[dict[str, Any]]:
    """Real cases beside their simulation: prediction error = simulated step / real step - 1, with the collectives' share."""
    found: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for line in newest((line for line in read(path) if line["figure"] == "decode"), *PAIRED, "simulated"):
        found.setdefault(tuple(line[key] for key in PAIRED), {})[line["simulated"]] = line
    return [
        dict(zip(PAIRED, key))
        | {
            "kind": both[False]["kind"],
            "step_us": both[False]["step_us"],
            "simulated_step_us": both[True]["step_us"],
            "tokens_per_s_per_gpu": both[False]["tokens_per_s_per_gpu"],
            "simulated_tokens_per_s_per_gpu": both[True]["tokens_per_s_per_gpu"],
            "collectives_share": both[False]["collectives_share"],
            "prediction_error": both[True]["step_us"] / both[False]["step_us"] - 1,
        }
        for key, both in found.items()
        if len(both) == 2
    ]


# ---- http


def http(run: Run) -> None:
    todo = [rate for rate in run.sizes.rates if not run.has(part="http", rate=rate)]
    if not todo:
        return
    with run.launch(run.world, 1, run.folder / "http.log") as launched:
        launched.wait_ready()
        asyncio.run(serving.load(launched.port, run.world, run.world, 24, run.sizes.tokens))  # warm
        for rate in todo:
            before, start = tokens_by_replica(launched.port), time.perf_counter()
            done = asyncio.run(at_rate(launched.port, rate, run.sizes.requests, run.sizes.tokens))
            seconds = time.perf_counter() - start
            after = tokens_by_replica(launched.port)
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

    paired = {tuple(pair[name] for name in PAIRED) for pair in pairs(run.decode_results)}
    lines = [line for line in read(run.decode_results) if tuple(line.get(name) for name in PAIRED) in paired]
    if not lines:
        print("figure: no case ran both really and simulated")
        return
    drawn = throughput(lines, f"Decoding throughput on {run.world} ranks, and as one simulated rank predicts it")
    folders = Folders(run.folder, RESULTS.parent / "figures" if run.device == "cuda" else run.folder)
    folders.save(drawn, f"throughput_of_{run.world}_gpus", origin(lines))


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
    args.folder.mkdir(parents=True, exist_ok=True)
    run = Run(world, args.device, Sizes.of(world, args.device), args.folder)
    return int(not run_parts({name: functools.partial(globals()[name], run) for name in args.parts}))


if __name__ == "__main__":
    sys.exit(main())
