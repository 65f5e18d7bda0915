"""Random operations on scheduler and core: any mix of preemption, chunking, prefix hits, drafts and asynchronous steps
gives each request the text it would have alone, exactly one end, and books that add up after every step."""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import RequestRejected, WorkerFailed
from engine.messages import RequestFailed, TokenOutput
from engine.plan import StepResult
from engine.sampling_params import SamplingParams
from tests.engine.host import EOS, Host, request


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    num_drafts = draw(st.sampled_from([0, 0, 1, 2, 3]))
    return Host(
        num_blocks=draw(st.integers(3, 12)),
        max_model_len=draw(st.sampled_from([100, 400, 2000])),
        num_drafts=num_drafts,
        asynchronous=draw(st.booleans()),
        prefix_cache=draw(st.booleans()),
        max_num_batched_tokens=draw(st.sampled_from([1 + num_drafts, 13, 70, 512])),
        max_num_seqs=draw(st.sampled_from([1, 3, 16])),
        prefill_chunk=draw(st.sampled_from([0, 1, 30, 64, 100])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_skips=draw(st.sampled_from([0, 1, 64])),
        max_queued_requests=draw(st.sampled_from([0, 6])),
    )


class EngineMachine(RuleBasedStateMachine):
    """Report S06, M13: whatever comes in whatever order, nothing leaks and every text is right."""

    host: Host

    @initialize(host=hosts())
    def start(self, host: Host) -> None:
        self.host = host
        self.count = 0
        self.failing: set[str] = set()

    @rule(
        length=st.one_of(st.integers(1, 20), st.integers(50, 330)),
        max_tokens=st.one_of(st.none(), st.integers(1, 20), st.integers(20, 200)),
        family=st.integers(0, 2),
        salt=st.sampled_from(["", "", "x"]),
        priority=st.integers(-1, 1),
        stop=st.lists(st.integers(0, EOS), max_size=2),
        eos=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 3, 20]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        penalty=st.sampled_from([1.0, 1.1]),
        grammar=st.sampled_from([None, None, "{}"]),
    )
    def add(
        self,
        length: int,
        max_tokens: int | None,
        family: int,
        salt: str,
        priority: int,
        stop: list[int],
        eos: bool,
        min_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        penalty: float,
        grammar: str | None,
    ) -> None:
        self.count += 1
        message = request(
            f"r{self.count}",
            length,
            max_tokens,
            family=family,
            salt=salt,
            priority=priority,
            stop_token_ids=stop,
            eos_token_ids=[EOS] if eos else [],
            min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            repetition_penalty=penalty,
            grammar=grammar,
        )
        before = self.host.scheduler.stats()
        try:
            self.host.add(message)
        except RequestRejected as error:
            total = length + (max_tokens or 1)
            full = self.host.config.max_queued_requests == 6 and before.num_waiting >= 6
            assert error.code == "queue_full" if full else total > self.host.limit
            assert self.host.scheduler.stats() == before

    @precondition(lambda self: self.host.core.has_work)
    @rule(which=st.integers(0, 30), reason=st.sampled_from(["abort", "stop"]))
    def abort(self, which: int, reason: str) -> None:
        live = [name for name in self.host.messages if name not in self.host.ends]
        if live:
            output = self.host.abort(live[which % len(live)], reason)
            assert output is not None and output.finish_reason == reason

    @precondition(lambda self: self.host.core.has_work)
    @rule(which=st.integers(0, 60))
    def break_one(self, which: int) -> None:
        live = [name for name in self.host.messages if name not in self.host.ends]
        if live and which < len(live):
            self.failing.add(live[which])
            self.host.device.fail[live[which]] = "not a number"

    @rule()
    def reset_prefix_cache(self) -> None:
        self.host.core.reset_prefix_cache()

    @precondition(lambda self: self.host.core.has_work)
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.host.step()

    @invariant()
    def books_add_up(self) -> None:
        self.host.blocks.check_invariants()
        stats = self.host.scheduler.stats()
        live = [name for name in self.host.messages if name not in self.host.ends]
        assert stats.num_running + stats.num_waiting == len(live)
        assert stats.reserved_tokens == sum(
            len(self.host.messages[name].prompt_token_ids) + len(self.host.tokens[name]) for name in live
        )
        assert stats.generation_tokens == sum(map(len, self.host.tokens.values()))

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.run()
        assert set(self.host.ends) == set(self.host.messages)
        for name, end in self.host.ends.items():
            if isinstance(end, RequestFailed):
                assert name in self.failing and end.code == "internal"
            elif end.finish_reason != "abort" and end.finished_time and name not in self.stopped():
                self.host.check(name)

    def stopped(self) -> set[str]:
        """Requests that the front end ended with reason "stop": their last message carries no token."""
        return {
            name
            for name, end in self.host.ends.items()
            if isinstance(end, TokenOutput) and end.finish_reason == "stop" and not end.token_ids
        }


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase


WORKLOAD = [
    (f"r{index}", length, max_tokens, index % 3)
    for index, (length, max_tokens) in enumerate(
        [(5, 90), (300, 20), (130, 70), (1, 100), (300, 3), (64, 64), (129, 1), (200, 130)]
    )
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [6, 100])
@pytest.mark.parametrize("prefill_chunk", [0, 17, 64])
def test_same_text_under_every_feature(asynchronous: bool, num_drafts: int, num_blocks: int, prefill_chunk: int) -> None:
    """With 6 blocks the eight requests preempt each other; with 100 none does."""
    host = Host(
        num_blocks=num_blocks,
        asynchronous=asynchronous,
        num_drafts=num_drafts,
        prefill_chunk=prefill_chunk,
        max_num_batched_tokens=256,
        max_num_seqs=4,
    )
    for name, length, max_tokens, family in WORKLOAD:
        host.add(request(name, length, max_tokens, family=family, stop_token_ids=[7] if family == 1 else [], min_tokens=1))
    host.run()
    host.check()
    stats = host.scheduler.stats()
    assert (stats.num_preemptions > 0) == (num_blocks == 6)
    assert stats.prefix_hits > 0


def test_asynchronous_steps_overlap() -> None:
    """One plan is in flight when the next is submitted, and each request still ends at its exact count."""
    host = Host(asynchronous=True)
    host.add(request("a", 10, 5))
    assert host.step() == []  # submitted, nothing due
    assert len(host.step()[0].token_ids) == 1
    host.run()
    host.check()
    # Ended by length: the token in flight is known to be the last, so no step is wasted.
    assert len(host.device.plans) == 5


def test_asynchronous_stop_wastes_one_step_and_no_token() -> None:
    host = Host(asynchronous=True)
    host.add(request("a", 10, 50, stop_token_ids=list(range(20))))
    host.run()
    host.check()
    assert len(host.device.plans) == len(host.tokens["a"]) + 1


def test_drafts_in_flight_hold_nothing_up() -> None:
    """Each step is submitted before the result of the one before it; the plan then gives a lower bound of the lengths."""
    host = Host(asynchronous=True, num_drafts=2)
    host.add(request("a", 10, 40))
    for index in range(4):
        host.step()
        host.add(request(f"b{index}", 10, 40))
    host.run()
    host.check()
    full = [plan for plan in host.device.plans if len(plan.decodes) == 5]
    assert len(full) > 8, "the batch fell apart into rows that take turns"
    assert all(step.drafts_in_flight == 2 for plan in full[1:-1] for step in plan.decodes)
    # A sequence of 40 tokens takes at least 14 steps of up to three; only the one in flight at its end is wasted.
    steps_of_a = sum(step.row == 0 for plan in host.device.plans for step in plan.decodes)
    assert 13 <= steps_of_a <= 41


def test_rows_with_a_grammar_wait_for_their_token() -> None:
    """The mask of a token needs the one before it on the host; other rows do not wait, and such rows take no drafts."""
    host = Host(asynchronous=True)
    host.add(request("free", 10, 20), request("bound", 10, 20, grammar="{}"))
    host.run()
    host.check()
    both = [len(plan.decodes) for plan in host.device.plans]
    assert both.count(2) <= 11 and len(host.device.plans) <= 41
    host = Host(num_drafts=2)
    host.add(request("bound", 10, 20, grammar="{}"))
    host.run()
    host.check()
    assert all(step.num_drafts == 0 for plan in host.device.plans for step in plan.decodes)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_row_fails_only_its_request(asynchronous: bool) -> None:
    """And its blocks are no prefix for anybody: what is in them is in doubt."""
    host = Host(asynchronous=asynchronous)
    host.add(request("good", 100, 30, family=1), request("bad", 200, 30, family=0))
    for _ in range(4):
        host.step()
    host.device.fail["bad"] = "logits are not finite"
    host.run()
    host.check("good")
    end = host.ends["bad"]
    assert isinstance(end, RequestFailed) and (end.message, end.code) == ("logits are not finite", "internal")
    host.add(request("again", 200, 5, family=0), request("hit", 100, 5, family=1))
    host.run()
    host.check("again", "hit")
    assert host.ends["again"].num_cached_tokens == 0 and host.ends["hit"].num_cached_tokens == 64


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_while_in_flight_and_reuse_of_the_row(asynchronous: bool) -> None:
    """Report S13: rows and blocks of an aborted request serve the next one in the very next step, and nothing mixes."""
    host = Host(asynchronous=asynchronous, num_blocks=5, max_num_seqs=1)
    for index in range(12):
        host.add(request(f"r{index}", 100 + index, 200, family=index))
        for _ in range(3 + index % 4):
            host.step()
        running = host.scheduler.stats()
        assert running.num_running == 1
        if index % 3:
            output = host.abort(f"r{index}")
            assert output is not None and output.finish_reason == "abort"
            assert host.abort(f"r{index}") is None
            stats = host.scheduler.stats()
            assert stats.num_running == 0 and stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        else:
            host.run()
            host.check(f"r{index}")
    host.run()


def test_abort_while_waiting_and_abort_all() -> None:
    host = Host(max_num_seqs=1)
    host.add(*(request(f"r{index}", 10, 50) for index in range(4)))
    host.step()
    assert host.abort("r2") is not None
    outputs = host.core.abort_all()
    assert [output.request_id for output in outputs] == ["r0", "r1", "r3"]
    assert not host.core.has_work and host.core.step() == []
    assert host.blocks.num_used == 0


def test_a_stop_string_finishes_instead_of_aborting() -> None:
    """Report M02: the front end found a stop string; usage ends where it says, and the rest is never produced."""
    host = Host(asynchronous=True, num_drafts=2)
    host.add(request("a", 10, 100))
    for _ in range(6):
        host.step()
    seen = len(host.tokens["a"])
    output = host.abort("a", "stop")
    assert output is not None and (output.finish_reason, output.num_output_tokens) == ("stop", seen)
    host.run()


def test_results_of_another_step_are_refused() -> None:
    host = Host()
    host.add(request("a", 10, 5))
    plan = host.scheduler.schedule()
    with pytest.raises(WorkerFailed, match="step 0 is due"):
        host.scheduler.update(plan, StepResult(3, []))
    host = Host()
    host.add(request("a", 10, 5))
    plan = host.scheduler.schedule()
    with pytest.raises(WorkerFailed, match="no result for row 0"):
        host.scheduler.update(plan, StepResult(0, []))


@pytest.mark.parametrize("method", ["submit", "collect"])
def test_a_step_that_did_not_end_ends_the_engine(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step says what happened; it must not fail over a result that belongs to another plan."""
    host = Host()
    host.add(request("a", 10, 5))
    with monkeypatch.context() as broken, pytest.raises(MemoryError):
        broken.setattr(host.device, method, lambda *_: (_ for _ in ()).throw(MemoryError()))
        host.core.step()
    with pytest.raises(WorkerFailed, match="an earlier step failed or was interrupted"):
        host.core.step()


def test_a_third_plan_in_flight_is_refused() -> None:
    host = Host()
    host.add(request("a", 10, 5))
    host.scheduler.schedule()
    host.scheduler.schedule()
    with pytest.raises(RuntimeError, match="two steps are in flight"):
        host.scheduler.schedule()


def test_lockstep_submits_empty_plans() -> None:
    """Replicas that step together take part in every step, with or without work of their own."""
    host = Host(asynchronous=True)
    core = type(host.core)(host.scheduler, host.device, asynchronous=True, lockstep=True)
    for _ in range(3):
        assert core.step() == [] and not core.has_work
    host.core = core
    host.add(request("a", 10, 3))
    while core.has_work:
        host.step()
    host.check()
    assert sum(plan.is_empty for plan in host.device.plans) >= 3


def test_lockstep_holds_prompts_until_all_replicas_open_the_step() -> None:
    """Prompts are computed only in steps that the agreement before them opened, so that other steps stay decode-only."""
    host = Host(asynchronous=True)
    host.core = type(host.core)(host.scheduler, host.device, asynchronous=True, lockstep=True)
    host.add(request("a", 100, 20))
    for step in range(200):
        if step == 5:
            host.add(request("b", 200, 6))
        host.step()
        if step > 5 and not host.core.has_work:
            break
    host.check()
    plans = host.device.plans
    assert any(plan.prefills for plan in plans) and any(plan.decodes and not plan.prefills for plan in plans)
    for before, plan in itertools.pairwise(plans):
        assert before.wants_prefill or not plan.prefills
    assert not plans[0].prefills


def test_acceptance_is_logged_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, over what was verified since the last line; nothing where nothing was."""
    monkeypatch.setattr("engine.core._DRAFTS_EVERY", 0.0)
    host = Host(num_drafts=2)
    host.add(request("a", 10, 40))
    with caplog.at_level(logging.INFO, logger="engine.core"):
        host.run()
    lines = [record.message for record in caplog.records]
    stats = host.scheduler.stats()
    assert len(lines) == stats.spec_drafts > 5
    accepted = [[float(part) for part in line.split()[1:3]] for line in lines]
    assert [sum(column) for column in zip(*accepted)] == stats.spec_accepted_per_pos
    assert all(line.endswith("depth now 2") for line in lines[:-2])


def test_a_leak_is_logged_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Report S07: an accounting error does not kill the engine."""
    host = Host()
    host.blocks.allocate(2)
    host.add(request("a", 10, 3))
    with caplog.at_level(logging.ERROR):
        while host.core.has_work:
            host.step()
        host.core.step()
    assert [record.getMessage() for record in caplog.records] == ["cache leak: 2 of 64 blocks are in use without a request"]
    host.check()


def test_stats_count() -> None:
    host = Host(num_drafts=2)
    host.add(request("a", 100, 20), request("b", 10, 30))
    host.run()
    host.add(request("c", 200, 1))
    host.run()
    host.check()
    stats = host.core.stats()
    assert stats.prompt_tokens == stats.prefix_queries == 310 and stats.generation_tokens == 51
    assert stats.prefix_hits == 0  # one full block is known, and given up for the draft layer
    assert stats.num_steps == len(host.device.plans) and stats.model_seconds == 0.5 * stats.num_steps
    assert stats.spec_draft_tokens == sum(step.num_drafts for plan in host.device.plans for step in plan.decodes)
    assert stats.spec_drafts == sum(step.num_drafts > 0 for plan in host.device.plans for step in plan.decodes)
    first, second = stats.spec_accepted_per_pos
    assert stats.spec_drafts > first > second > 0
    ends = [host.ends[name] for name in "abc"]
    assert sum(end.spec_accepted for end in ends if isinstance(end, TokenOutput)) == first + second
    assert sum(end.spec_drafted for end in ends if isinstance(end, TokenOutput)) == stats.spec_draft_tokens
    assert stats.step_seconds > 0 and stats.reserved_tokens == 0


@settings(max_examples=30, deadline=None)
@given(hosts(), st.data())
def test_load_beyond_capacity_drains(host: Host, data: st.DataObject) -> None:
    """Report S03: under cache pressure something always moves; the fake device bounds the steps it takes."""
    for index in range(data.draw(st.integers(1, 14))):
        length = data.draw(st.integers(1, host.limit - 1))
        message = request(f"r{index}", length, data.draw(st.integers(1, host.limit - length)), family=index % 2)
        try:
            host.add(message)
        except RequestRejected as error:
            assert error.code == "queue_full"
    host.run()
    host.check()


def test_sampling_params_reach_the_ranks_with_a_seed() -> None:
    host = Host()
    host.add(request("a", 5, 2), request("b", 5, 2, seed=11))
    host.run()
    sent: dict[str, SamplingParams] = {new.request_id: new.params for plan in host.device.plans for new in plan.new_sequences}
    assert sent["a"].seed is not None and sent["b"].seed == 11
