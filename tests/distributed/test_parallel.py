"""Two and four gloo processes compute what one process computes: heads, experts, vocabulary and replicas split."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels.layout import CacheFormat
from models.causal_lm import load_model
from models.config import load_model_config
from models.parallel import ParallelContext
from tests.distributed.launched import ROOT, free_port
from tests.models.driver import Driver
from tests.reference_checkpoints import reference_checkpoint, references


def run_ranks(world_size: int, *arguments: str, module: str, timeout_s: float) -> None:
    """Start a module of tests once per rank; a rank that fails fails the test with its output."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for rank, (p, output) in enumerate(zip(processes, outputs)):
        assert p.returncode == 0, f"rank {rank} failed:\n{output}"


# ---- what a rank does ---------------------------------------------------------------------------------------------


def steps_of_one_replica(
    variant: str, parallel: ParallelContext, requests: list[list[int]], dtype: torch.dtype, rows: int
) -> torch.Tensor:
    """Logits of a prefill, a mixed and a decode step, each with its draft pass; no requests means idle steps.

    rows: the row count that all replicas pad their expert exchange to.
    """
    folder = reference_checkpoint(variant)
    config = load_model_config(folder)
    model = load_model(folder, config, parallel, device="cpu", dtype=dtype, max_model_len=512, with_mtp=True)
    driver = Driver(model, config, fmt=CacheFormat.FP32, ep_rows=rows)
    if not requests:
        plans = [({}, {})] * 3
    else:
        a, b = requests
        plans = [({}, {0: a[:9]}), ({0: a[9:10]}, {1: b[:12]}), ({0: a[10:11], 1: b[12:13]}, {})]
    logits = []
    with torch.inference_mode():
        for decodes, prefills in plans:
            batch = driver.batch(decodes, prefills)
            hidden = model.forward(batch)
            logits.append(model.logits(hidden))
            logits.append(model.logits(model.mtp.forward(batch.input_ids, hidden, batch)))
    return torch.cat(logits)


def requests_of(variant: str, replica: int, idle: int) -> list[list[int]]:
    """Two sequences for each replica, different ones; none for the idle replica."""
    if replica == idle:
        return []
    refs = references(variant)
    return [refs[replica % 2].ids, refs[1 - replica % 2].ids]


def rank_main(cases: list[str]) -> None:
    torch.distributed.init_process_group("gloo")
    for case in cases:
        variant, *sizes = case.split(":")
        dp, tp, idle = map(int, sizes)
        parallel = ParallelContext.create(dp, tp, "cpu")
        requests = requests_of(variant, parallel.dp_rank, idle)
        got = steps_of_one_replica(variant, parallel, requests, torch.float32, 13)
        want = steps_of_one_replica(variant, ParallelContext.single(), requests, torch.float32, 0)
        assert got.shape == want.shape, (case, got.shape, want.shape)
        if got.numel():
            worst = float((got - want).abs().max() / (want.max() - want.min()))
            assert worst < 2e-5, f"{case}: rank {parallel.rank} differs by {worst} of the logits' range"
        check_control_plane(parallel)
    torch.distributed.destroy_process_group()


def check_control_plane(parallel: ParallelContext) -> None:
    for size in (0, 10, 4087, 4088, 4089, 100_000):
        payload = bytes(i % 251 for i in range(size))
        assert parallel.tp_broadcast_bytes(payload if parallel.is_leader else None) == payload
    if parallel.is_leader:
        gathered = parallel.leaders_all_gather([parallel.dp_rank, 7])
        assert gathered == [[d, 7] for d in range(parallel.dp)]
    ids = torch.full((3,), parallel.rank)
    assert parallel.tp_broadcast(ids).tolist() == [parallel.dp_rank * parallel.tp] * 3
    x = torch.arange(6.0).view(2, 3) + 100 * parallel.tp_rank
    assert parallel.tp_all_gather(x, dim=-1).shape == (2, 3 * parallel.tp)
    assert parallel.tp_all_gather(x, dim=-1)[0, -3:].tolist() == [100.0 * (parallel.tp - 1) + i for i in range(3)]


# ---- tests --------------------------------------------------------------------------------------------------------


CASES = {  # variant : dp : tp : replica without rows
    2: ["deepseek_v3-tiny:1:2:-1", "deepseek_v3-tiny:2:1:-1", "longcat_flash-tiny:1:2:-1"],
    4: ["deepseek_v3-tiny:2:2:1", "deepseek_v3-tiny-fp8:1:4:-1", "longcat_flash-tiny:2:2:0"],
}


@pytest.mark.parametrize("world_size", list(CASES))
def test_ranks_agree_with_one_process(world_size) -> None:
    """Prefill, mixed and decode steps with drafts, also beside a replica without rows. Reports N16, L13, K03: padding
    reaches no expert and no sum, expert names and the cache are the same in every parallel mode."""
    for case in CASES[world_size]:
        reference_checkpoint(case.split(":")[0])  # once, not in every rank
    run_ranks(world_size, *CASES[world_size], module="tests.distributed.test_parallel", timeout_s=240)


def test_wrong_world_size_is_named() -> None:
    with pytest.raises(ValueError, match="not initialised"):
        ParallelContext.create(2, 2, "cpu")


def test_single_rank_collectives_return_their_argument() -> None:
    parallel, x = ParallelContext.single(), torch.ones(3)
    for collective in (parallel.tp_all_reduce, parallel.tp_all_gather, parallel.ep_all_gather, parallel.ep_reduce_scatter):
        assert collective(x) is x
    assert parallel.leaders_all_gather([1, 2]) == [[1, 2]]
    assert parallel.tp_broadcast_bytes(b"plan") == b"plan"


if __name__ == "__main__":
    rank_main(sys.argv[1:])
