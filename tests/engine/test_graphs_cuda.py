"""CUDA graphs on a GPU: a set that grows while the engine serves, and memory that runs out in a capture."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from engine import executor as executor_module
from engine.executor import Executor
from engine.worker import WorkerInfo
from tests.comparator import assert_same_generations
from tests.engine.test_core import Engine
from tests.engine.test_engine_cuda import GREEDY, MOST_SEQS, NUM_BLOCKS, eager, generations, new_worker, prompts

pytestmark = pytest.mark.hopper


@pytest.fixture
def worker() -> tuple[Executor, WorkerInfo]:
    """Without graphs yet."""
    return new_worker(graphs=False)


def check_tokens(executor: Executor, info: WorkerInfo) -> None:
    served = Engine(
        executor, vocab_size=info.model_config.vocab_size, max_model_len=1024, num_blocks=NUM_BLOCKS, prefix_cache=False,
        asynchronous=True, max_num_seqs=MOST_SEQS,
    )  # fmt: skip
    served.run(prompts(), GREEDY)
    assert_same_generations(generations(served), *eager())


def test_graphs_that_arrive_while_serving(worker: tuple[Executor, WorkerInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    executor, info = worker
    runner = executor._runner
    runner.capture_graphs(show_progress=False, fast_start=True)
    before = runner.num_graphs
    monkeypatch.setattr(executor_module, "_SERVING_PER_CAPTURE", 1.0)
    check_tokens(executor, info)
    assert runner.num_graphs > before
    while not runner.graphs_complete:
        executor.idle()
    check_tokens(executor, info)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """torch may take 4 MB more than it holds."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_capture_without_memory(
    worker: tuple[Executor, WorkerInfo], little_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Report O01: named, and served without the graphs that did not fit."""
    executor, info = worker
    with caplog.at_level(logging.WARNING):
        executor._runner.capture_graphs(show_progress=False)
    assert "--no-cuda-graphs" in caplog.text and executor._runner.graphs_complete
    torch.cuda.set_per_process_memory_fraction(1.0)
    check_tokens(executor, info)
