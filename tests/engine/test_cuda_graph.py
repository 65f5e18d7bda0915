"""Which step replays which graph, what a replay is given, and how the set of graphs grows or stays small. On a CPU, where a
replay makes the recorded call again (fake_graphs.py); tests/engine/test_engine_cuda.py has the device's own graphs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from engine import executor as executor_module
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.cuda_graph import capture_sizes
from engine.executor import Executor
from engine.messages import AddRequest, TokenOutput
from engine.model_runner import ModelRunner
from engine.plan import Agreement, SequenceStep, StepPlan, StepResult
from engine.sampling_params import SamplingParams
from engine.worker import assemble_core, build_worker
from models.parallel import ParallelContext
from tests.engine.fake_graphs import FakePool, pool
from tests.engine.plan_driver import Driver
from tests.engine.stub_model import VOCAB, StubModel, stub_runner
from tests.engine.test_executor import first_plan, in_threads, ranks
from tests.reference_checkpoints import reference_checkpoint

__all__ = ["pool"]  # a fixture


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB, (9 + 7 * i,), generator=generator).tolist() for i in range(count)]


def decode(driver: Driver, rows: Sequence[int], steps: int) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {row: [] for row in rows}
    for _ in range(steps):
        for result in driver.run([driver.step_of(row) for row in rows]).wait().rows:
            got[result.row] += result.token_ids
    return got


def started(runner: ModelRunner, texts: Sequence[list[int]]) -> tuple[Driver, list[int]]:
    """A driver whose rows hold the texts, and each row's first token."""
    driver = Driver(runner)
    for row, text in enumerate(texts):
        driver.start(row, len(text))
    results = driver.run(prefills=[driver.step_of(row, text) for row, text in enumerate(texts)]).wait().rows
    return driver, [result.token_ids[0] for result in results]


def sizes_of(pool: FakePool) -> list[int]:
    return [len(graph.result[0]) for graph in pool.graphs]


def test_every_batch_replays_the_smallest_graph_that_holds_it(pool: FakePool) -> None:
    """Reports N07, N05: at each captured size less one, exact and more one; padding is neither read nor written."""
    texts = prompts(8)
    runner = stub_runner(StubModel())
    driver, first = started(runner, texts)
    runner.capture_graphs(show_progress=False, sizes=[1, 2, 4, 6])
    assert sizes_of(pool) == [6, 4, 2, 1]
    got = [[token] for token in first]
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 6, 5, 4, 3, 2, 1):
        before = [graph.replays for graph in pool.graphs]
        for row, tokens in decode(driver, range(count), 1).items():
            got[row] += tokens
        replayed = [size for size, graph, old in zip(sizes_of(pool), pool.graphs, before) if graph.replays > old]
        assert replayed == [size for size in (1, 2, 4, 6) if size >= count][:1]
    for text, tokens in zip(texts, got):
        assert tokens == StubModel().expected_greedy(text, len(tokens))


def test_a_fast_start_serves_on_few_graphs_and_adds_the_rest(pool: FakePool) -> None:
    """Graphs that are captured between steps leave the served sequences' slots and tokens alone."""
    texts = prompts(8)
    runner = stub_runner(StubModel())
    runner.capture_graphs(show_progress=False, sizes=[1, 2, 4, 6, 8, 10], fast_start=True)
    assert sizes_of(pool) == [10, 8, 1] and not runner.graphs_complete
    driver, first = started(runner, texts)
    got = [[token] for token in first]
    content = runner.cache.layers[0].content
    for count, captured in ((8, 6), (3, 4), (2, 2)):
        for row, tokens in decode(driver, range(count), 3).items():
            got[row] += tokens
        held = content.clone()
        content.fill_(5.0)
        runner.capture_next_graph(count, 1)
        assert bool((content == 5.0).all()), "a pass of no step wrote into slots, which may be another sequence's by now"
        content.copy_(held)
        assert sizes_of(pool)[-1] == captured, "the size that the last step wanted, else the largest"
    assert runner.graphs_complete
    runner.capture_next_graph(3, 1)
    assert sizes_of(pool) == [10, 8, 1, 6, 4, 2]
    for row, tokens in decode(driver, range(8), 3).items():
        got[row] += tokens
    for text, tokens in zip(texts, got):
        assert tokens == StubModel().expected_greedy(text, len(tokens))


def executor_of(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, seconds: float) -> tuple[Executor, list[float]]:
    """An executor whose captures take `seconds`; its clock is the list's only entry."""
    now = [100.0]
    monkeypatch.setattr(executor_module.time, "perf_counter", lambda: now[0])
    real = runner.capture_next_graph

    def capture(num_sequences: int, query_len: int) -> None:
        real(num_sequences, query_len)
        now[0] += seconds

    monkeypatch.setattr(runner, "capture_next_graph", capture)
    return Executor(runner, ParallelContext.single()), now


def test_a_busy_engine_captures_in_a_tenth_of_its_time(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = stub_runner(StubModel())
    runner.capture_graphs(show_progress=False, sizes=list(range(1, 12)), fast_start=True)
    executor, now = executor_of(runner, monkeypatch, 0.5)
    driver, text = Driver(runner), prompts(1)[0]
    driver.start(0, len(text))
    plan = StepPlan(0, prefills=[driver.step_of(0, text)], new_sequences=driver.new)
    before = len(pool.graphs)
    executor.submit(plan)
    assert len(pool.graphs) == before and not executor.agreement.capture, "a first token waits for no capture"
    took = []
    for step in range(100):
        now[0] += 0.1
        executor.submit(StepPlan(1 + step, decodes=[driver.step_of(0)]))
        took.append(len(pool.graphs) - before)
        before = len(pool.graphs)
    assert max(took) == 1, "at most one graph a step"
    assert [step for step, count in enumerate(took) if count] == [0, 46, 92], "4.5 s of serving between captures of 0.5 s"


def test_an_idle_engine_captures_at_once(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in its process by `idle`; with other ranks by empty steps, which all of them make."""
    runner = stub_runner(StubModel())
    runner.capture_graphs(show_progress=False, sizes=list(range(1, 8)), fast_start=True)
    executor, _ = executor_of(runner, monkeypatch, 0.5)
    executor.idle()
    assert sizes_of(pool) == [7, 1, 6]
    for step in range(9):
        executor.submit(StepPlan(step))
    assert sizes_of(pool) == [7, 1, 6, 5, 4, 3, 2] and not executor.agreement.capture


def test_no_memory_for_any_graph_leaves_an_eager_engine(pool: FakePool, caplog: pytest.LogCaptureFixture) -> None:
    """Report O01: the message names what to lower, and the engine serves."""
    pool.room = 0
    runner = stub_runner(StubModel())
    with caplog.at_level(logging.WARNING):
        runner.capture_graphs(show_progress=False)
    (message,) = caplog.messages
    assert "--memory-fraction" in message and "--no-cuda-graphs" in message and "0 of 4 graphs" in message
    texts = prompts(3)
    driver, first = started(runner, texts)
    got = decode(driver, range(3), 5)
    assert [[token, *got[row]] for row, token in enumerate(first)] == [StubModel().expected_greedy(text, 6) for text in texts]
    assert runner.graphs_complete


def test_memory_that_runs_out_later_keeps_the_graphs_there_are(pool: FakePool, caplog: pytest.LogCaptureFixture) -> None:
    """Small batches pad up to what was captured."""
    pool.room = 2
    runner = stub_runner(StubModel())
    with caplog.at_level(logging.WARNING):
        runner.capture_graphs(show_progress=False)
    assert "2 of 4 graphs are used" in caplog.text and sizes_of(pool) == [8, 4] and runner.graphs_complete
    driver, _ = started(runner, prompts(2))
    decode(driver, [0], 1)
    assert [graph.replays for graph in pool.graphs] == [0, 1]


def test_other_errors_of_a_capture_pass_through(monkeypatch: pytest.MonkeyPatch, pool: FakePool) -> None:
    def broken(call: object) -> None:
        raise RuntimeError("an illegal operation")

    monkeypatch.setattr(pool, "record", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        stub_runner(StubModel()).capture_graphs(show_progress=False)


def test_ranks_give_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report D02: one of two ranks runs out at the third graph. Both must go on with two: a replay exchanges the padded number
    of rows, an eager pass the agreed one, so ranks with different graphs would wait for each other for ever."""
    barrier, votes = threading.Barrier(2, timeout=30), {"0": True, "1": True}
    pools = {"0": FakePool(), "1": FakePool(room=2)}

    def agree(could: bool) -> bool:
        votes[threading.current_thread().name] = could
        barrier.wait()
        everybody = all(votes.values())
        barrier.wait()
        return everybody

    monkeypatch.setattr("engine.cuda_graph.GraphPool", lambda: pools[threading.current_thread().name])
    runners = [stub_runner(StubModel()) for _ in range(2)]
    threads = []
    for name, runner in zip(pools, runners):
        monkeypatch.setattr(runner, "_all_ranks", agree)
        threads.append(threading.Thread(target=runner.capture_graphs, kwargs={"show_progress": False}, name=name))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    for runner in runners:
        assert runner.graphs_complete
        driver, _ = started(runner, prompts(1))
        decode(driver, [0], 1)
    assert [[graph.replays for graph in pool.graphs[:2]] for pool in pools.values()] == [[0, 1]] * 2


def test_followers_capture_when_their_leader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report D17: between the same two steps on every rank, of other replicas too, busy or idle; never while one computes a
    prompt, and never again once all are captured."""
    replicas = ranks(2, 2)
    everybody = [rank for replica in replicas for rank in replica]
    monkeypatch.setattr("engine.cuda_graph.GraphPool", FakePool)
    monkeypatch.setattr(executor_module, "_SERVING_PER_CAPTURE", 1e6)
    for rank in everybody:
        monkeypatch.setattr(rank._runner, "_all_ranks", bool)
    in_threads(
        *(lambda r=r: r._runner.capture_graphs(show_progress=False, sizes=[1, 2, 3, 4, 8], fast_start=True) for r in everybody)
    )  # type: ignore[misc]
    seen: list[list[int]] = []

    def lead(replica: int) -> None:
        leader, busy = replicas[replica][0], replica == 0
        for step in range(6):
            plan = StepPlan(step)
            if busy and step == 0:
                plan = first_plan()
            elif busy and step < 4:
                plan = StepPlan(step, decodes=[SequenceStep(2, 29 + step)])
            leader.submit(plan)
            leader.collect()
            if busy:
                seen.append([leader._runner.num_graphs, int(leader.agreement.capture)])
        leader.request_stop()
        leader.submit(StepPlan(6))

    in_threads(*(lambda r=r: lead(r) for r in range(2)), *(rank.follow for replica in replicas for rank in replica[1:]))  # type: ignore[misc]
    # a prompt; one capture, then a long wait between captures while busy; two idle steps
    assert seen == [[2, 0], [3, 1], [3, 0], [3, 0], [4, 1], [5, 1]]
    assert [rank._runner.num_graphs for rank in everybody] == [5] * 4
    assert len({tuple(rank._runner._graphs._graphs) for rank in everybody}) == 1, "in the same order too"


def outputs(core: EngineCore, texts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Greedy tokens of all texts, one more joining every other step."""
    found: list[list[int]] = [[] for _ in texts]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for step in range(10_000):
        if step % 2 == 0 and step // 2 < len(texts):
            core.add(AddRequest(str(step // 2), texts[step // 2], params, 0.0, []))
        for output in core.step():
            assert isinstance(output, TokenOutput)
            found[int(output.request_id)] += output.token_ids
        if step // 2 >= len(texts) and not core.has_work:
            return found
    raise AssertionError("never finished")


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("variant", ["deepseek_v3-tiny", "longcat_flash-tiny"])
def test_tokens_of_a_fast_start(variant: str, drafts: int, pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, all graphs and a fast start give the same tokens, with and without drafts; graphs arrive while it serves."""
    config = EngineConfig(
        model=str(reference_checkpoint(variant)), device="cpu", cache_format="fp32", max_model_len=256, num_cache_blocks=40,
        num_speculative_tokens=drafts, scheduler=SchedulerConfig(max_num_seqs=12),
    )  # fmt: skip
    texts = [[2 + (11 * i + 3 * j) % 90 for j in range(5 + 9 * i)] for i in range(6)]
    monkeypatch.setattr(executor_module, "_SERVING_PER_CAPTURE", 0.0)
    found = {}
    for name in ("eager", "graphs", "fast start"):
        parallel = ParallelContext.single()
        executor, info = build_worker(config, parallel)
        pool.graphs.clear()
        if name != "eager":
            executor._runner.capture_graphs(show_progress=False, fast_start=name == "fast start")
            at_start = len(pool.graphs)
        found[name] = outputs(assemble_core(config, executor, info, parallel), texts, 12)
        if name != "eager":
            assert sum(graph.replays for graph in pool.graphs) > 10
            assert (len(pool.graphs) > at_start) == (name == "fast start")
    assert found["eager"] == found["graphs"] == found["fast start"]


def test_a_simulated_world_steps_without_its_peers() -> None:
    """The engine of a simulated rank submits nothing without work, as that of a single rank; one with peers must."""
    config = EngineConfig(
        model=str(reference_checkpoint("deepseek_v3-tiny")), device="cpu", max_model_len=256, num_cache_blocks=8
    )
    executor, info = build_worker(config, ParallelContext.single())
    submitted: list[StepPlan] = []
    executor.submit = submitted.append  # type: ignore[method-assign]
    executor.collect = lambda: StepResult(0, [])  # type: ignore[method-assign]
    for parallel in (ParallelContext.single(), ParallelContext.simulated(8, 1)):
        assert assemble_core(config, executor, info, parallel).step() == [] and not submitted
    assemble_core(config, executor, info, ParallelContext(dp=2, tp=1, dp_rank=1, tp_rank=0)).step()
    assert len(submitted) == 1


def test_capture_sizes_cover_every_batch() -> None:
    for most in (1, 2, 3, 7, 64, 100, 256, 300, 1000):
        sizes = capture_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        assert all(later <= 2 * size + 8 for size, later in pairwise(sizes))


def test_a_prefill_beside_decodes_runs_eagerly(pool: FakePool) -> None:
    texts = prompts(3)
    runner = stub_runner(StubModel())
    runner.capture_graphs(show_progress=False)
    driver, first = started(runner, texts[:2])
    driver.start(2, len(texts[2]))
    steps = [driver.step_of(0), driver.step_of(1)]
    results = driver.run(steps, [driver.step_of(2, texts[2])]).wait().rows
    assert all(graph.replays == 0 for graph in pool.graphs)
    assert [first[0], results[0].token_ids[0]] == StubModel().expected_greedy(texts[0], 2)


def test_an_idle_replica_replays_what_the_others_do(pool: FakePool) -> None:
    """Report D01: without a sequence of its own it replays the agreed size, all of it padding, and writes nothing."""
    runner = stub_runner(StubModel())
    runner.capture_graphs(show_progress=False, sizes=[1, 4, 8])
    content = runner.cache.layers[0].content
    content.fill_(3.0)
    agreement = Agreement(rows=3, sequences=3, query_len=1, decode_only=True, any_work=True)
    assert runner.run(StepPlan(0, agreement=agreement)).wait().rows == []
    assert [graph.replays for graph in pool.graphs] == [0, 1, 0] and bool((content == 3.0).all())
