"""Scheduling policy: what is refused, who runs, who waits, who is preempted, and where an answer ends."""

from __future__ import annotations

from typing import Any

import pytest

from engine.block_manager import BLOCK_SIZE, BlockManager
from engine.config import SchedulerConfig
from engine.errors import ConfigError, RequestRejected
from engine.messages import AddRequest, TokenOutput
from engine.plan import StepPlan
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.engine.fake_device import VOCAB, next_token
from tests.engine.host import Host, prompt, request


def computed(plan: StepPlan, names: dict[int, str]) -> dict[str, int]:
    """Query tokens of a step by request id; `names` carries row -> request id from plan to plan."""
    for new in plan.new_sequences:
        names[new.row] = new.request_id
    return {names[step.row]: step.num_tokens for step in plan.decodes + plan.prefills}


def end_of(host: Host, name: str) -> TokenOutput:
    end = host.ends[name]
    assert isinstance(end, TokenOutput)
    return end


# ---- refusals


@pytest.mark.parametrize(
    ("message", "code", "param", "text"),
    [
        (AddRequest("a", [], SamplingParams(), 0.0), "invalid_request", "prompt", "at least one token"),
        (AddRequest("a", [1, VOCAB], SamplingParams(), 0.0), "invalid_request", "prompt", f"0..39, got {VOCAB}"),
        (AddRequest("a", [-1], SamplingParams(), 0.0), "invalid_request", "prompt", "got -1"),
        (AddRequest("a", [True], SamplingParams(), 0.0), "invalid_request", "prompt", "got True"),
        (AddRequest("a", [1, "x"], SamplingParams(), 0.0), "invalid_request", "prompt", "got 'x'"),  # type: ignore[list-item]
        (request("a", n=2), "invalid_request", "n", "one choice"),
        (request("a", temperature=-1.0), "invalid_request", "temperature", "temperature"),
        (request("a", stop_token_ids=[VOCAB]), "invalid_request", "stop_token_ids", "0..39"),
        (request("a", 257, None), "context_length_exceeded", "prompt", "context of 256 tokens"),
        (request("a", 256, None), "context_length_exceeded", "prompt", "at least one token of output"),
        (request("a", 200, 57), "context_length_exceeded", "max_tokens", "max_tokens = 57"),
        (request("a", 5, 10_000), "context_length_exceeded", "max_tokens", "lower max_tokens"),
        (request("a", 100, 93), "never_fits", None, "cache of 192 tokens"),
        (request("a", 192, None), "never_fits", None, "larger cache"),
    ],
)
def test_refused_before_it_queues(message: AddRequest, code: str, param: str | None, text: str) -> None:
    """Report S17: a refusal names field, limit and fix, changes nothing, and the next call works. Report X23: empty prompt."""
    host = Host(num_blocks=3, max_model_len=256)
    before = host.scheduler.stats()
    with pytest.raises(RequestRejected, match=text) as refused:
        host.add(message)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert host.scheduler.stats() == before and not host.core.has_work
    host.add(request("a"))
    host.run()
    host.check()


@pytest.mark.parametrize(("length", "max_tokens"), [(1, 255), (200, 56), (255, 1), (255, None), (1, None)])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_context_can_be_filled_exactly(length: int, max_tokens: int | None, num_drafts: int, asynchronous: bool) -> None:
    """Report S17: prompt + max_tokens equal to the context is accepted; max_tokens None runs to the context's end."""
    host = Host(num_blocks=4, max_model_len=256, num_drafts=num_drafts, asynchronous=asynchronous)
    host.add(request("a", length, max_tokens))
    host.run()
    host.check()
    assert len(host.tokens["a"]) == 256 - length and end_of(host, "a").finish_reason == "length"


def test_without_max_tokens_a_small_cache_is_the_end() -> None:
    host = Host(num_blocks=2, max_model_len=2048)
    host.add(request("a", 100, None))
    host.run()
    assert len(host.tokens["a"]) == 28 and end_of(host, "a").finish_reason == "length"


def test_a_live_id_is_refused_and_a_finished_one_is_not() -> None:
    """Report S18: the second request with one id is refused; the first is unharmed."""
    host = Host()
    host.add(request("a", 5, 10))
    host.step()
    with pytest.raises(RequestRejected) as refused:
        host.core.add(request("a", 50, 3))
    assert refused.value.code == "duplicate_request_id"
    host.run()
    host.check()
    host.core.add(request("a", 5, 1))


def test_a_full_queue_refuses() -> None:
    host = Host(max_num_seqs=1, max_queued_requests=2)
    host.add(request("a", 5, 5))
    host.step()
    host.add(request("b"), request("c"))
    with pytest.raises(RequestRejected) as refused:
        host.add(request("d"))
    assert refused.value.code == "queue_full"
    host.run()
    host.add(request("d"))
    host.run()
    host.check()


def test_a_budget_below_one_sequence_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: one sequence needs 4, got 3"):
        Scheduler(
            SchedulerConfig(max_num_batched_tokens=3),
            BlockManager(4, True),
            max_model_len=64,
            vocab_size=VOCAB,
            num_speculative_tokens=3,
        )


# ---- who runs


def test_decodes_run_in_every_step_beside_long_prefills() -> None:
    """Report S14: with steady arrivals of long prompts every decoding sequence gets a token in every step."""
    host = Host(num_blocks=400, max_num_batched_tokens=128, max_num_seqs=16, prefix_cache=False)
    host.add(*(request(f"d{index}", 3, 60) for index in range(4)))
    host.step()
    for index in range(50):
        host.add(request(f"p{index}", 300, 1, family=index))
        outputs = host.step()
        assert {f"d{i}" for i in range(4)} <= {output.request_id for output in outputs}
        assert len(host.device.plans[-1].prefills) >= 1
    host.run()
    host.check()


def test_short_prompts_do_not_queue_behind_a_long_one() -> None:
    """Report S15: one prompt of many chunks shares the budget; short ones behind it answer long before it does."""
    host = Host(num_blocks=600, max_model_len=20_000, max_num_batched_tokens=512, prefix_cache=False)
    host.add(request("long", 16_000, 1), *(request(f"s{index}", 100, 2, family=1) for index in range(20)))
    names: dict[int, str] = {}
    finished_in: dict[str, int] = {}
    shares = []
    while host.core.has_work:
        for output in host.step():
            if isinstance(output, TokenOutput) and output.finish_reason:
                finished_in[output.request_id] = len(host.device.plans)
        shares.append(computed(host.device.plans[-1], names).get("long", 0))
    assert max(finished_in[f"s{index}"] for index in range(20)) <= 20
    assert finished_in["long"] <= 16_000 // 512 + 12  # it is not starved either
    assert all(share >= 256 for share in shares[:-1])
    host.check()


def test_several_long_prompts_progress_together_and_the_oldest_ends_first() -> None:
    host = Host(num_blocks=600, max_model_len=9000, max_num_batched_tokens=1024, prefix_cache=False)
    host.add(*(request(f"p{index}", 8000, 1) for index in range(4)))
    names: dict[int, str] = {}
    host.step()
    first = computed(host.device.plans[0], names)
    assert first["p0"] >= 512 and first["p1"] >= 256 and sum(first.values()) == 1024
    ends: list[str] = []
    while host.core.has_work:
        ends += [output.request_id for output in host.step() if isinstance(output, TokenOutput) and output.finish_reason]
        assert host.device.plans[-1].num_tokens == 1024 or not host.scheduler.stats().num_waiting
    assert ends == ["p0", "p1", "p2", "p3"]
    host.check()


def test_every_running_prefill_gets_a_token_of_the_smallest_budget() -> None:
    host = Host(max_num_batched_tokens=4, max_num_seqs=16, prefix_cache=False)
    host.add(*(request(f"r{index}", 30, 3) for index in range(8)))
    names: dict[int, str] = {}
    while host.core.has_work:
        running = host.scheduler.stats().num_running
        host.step()
        assert len(computed(host.device.plans[-1], names)) >= running
    host.check()


@pytest.mark.parametrize("prefill_chunk", [1, 50, 64])
def test_prefill_chunk_bounds_one_sequence(prefill_chunk: int) -> None:
    host = Host(max_num_batched_tokens=256, prefill_chunk=prefill_chunk)
    host.add(request("a", 200, 2), request("b", 130, 2, family=1))
    host.run()
    host.check()
    assert max(step.num_tokens for plan in host.device.plans for step in plan.prefills) == prefill_chunk
    assert len(host.device.plans[0].prefills) == 2  # the cap of one leaves budget to the other


def test_small_requests_overtake_a_large_one_but_not_for_ever() -> None:
    """Report S16: those that fit pass one that lacks blocks, max_skips times; then it is served first."""
    host = Host(num_blocks=8, max_skips=5, prefix_cache=False)
    host.add(request("holder", 200, 150, family=1))
    host.step()
    host.add(request("large", 400, 10))
    starts: list[str] = []
    for index in range(40):
        host.add(request(f"s{index}", 10, 3, family=2))
        host.step()
        starts += [new.request_id for new in host.device.plans[-1].new_sequences]
    assert starts == [f"s{index}" for index in range(5)]
    host.run()
    host.check()
    starts += [new.request_id for plan in host.device.plans[41:] for new in plan.new_sequences]
    assert starts[5] == "large"


def test_admission_leaves_running_sequences_room_to_grow() -> None:
    """One block per eight running sequences stays free, or the newcomer would be preempted within a few steps."""
    host = Host(num_blocks=10, prefix_cache=False)
    host.add(*(request(f"r{index}", 5, 30, family=index) for index in range(8)))
    host.step()
    host.add(request("fits exactly", 100, 5))
    for _ in range(20):
        host.step()
        assert host.scheduler.stats().num_waiting == 1
    host.run()
    host.check()


def test_without_skips_the_queue_is_strict() -> None:
    host = Host(num_blocks=8, max_skips=0, prefix_cache=False)
    host.add(request("holder", 300, 50, family=1))
    host.step()
    host.add(request("large", 400, 10), request("small", 10, 3))
    for _ in range(20):
        host.step()
    assert host.scheduler.stats().num_waiting == 2
    host.run()
    host.check()


def test_priority_orders_the_queue_and_names_the_victim() -> None:
    host = Host(num_blocks=4, max_num_seqs=2, policy="priority", prefix_cache=False)
    host.add(request("low", 60, 100, priority=5), request("late", 5, 2, priority=1), request("high", 60, 100, priority=-1))
    host.step()
    assert [new.request_id for new in host.device.plans[0].new_sequences] == ["high", "late"]
    host.run()
    host.check()
    assert end_of(host, "high").num_preemptions == 0 and end_of(host, "low").num_preemptions > 0


def test_first_come_ignores_priority() -> None:
    host = Host(max_num_seqs=1)
    host.add(request("a", 5, 2, priority=5), request("b", 5, 2, priority=-5))
    host.run()
    assert [new.request_id for plan in host.device.plans for new in plan.new_sequences] == ["a", "b"]


# ---- preemption


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_under_pressure_the_oldest_always_moves(num_drafts: int, asynchronous: bool) -> None:
    """Report S03: with room for one and a half sequences all end, the oldest undisturbed and in the fewest steps."""
    host = Host(num_blocks=6, num_drafts=num_drafts, asynchronous=asynchronous, prefix_cache=False)
    host.add(*(request(f"r{index}", 60, 200, family=index) for index in range(6)))
    host.run(most_steps=6 * 450)
    host.check()
    assert end_of(host, "r0").num_preemptions == 0
    assert host.scheduler.stats().num_preemptions == sum(end_of(host, f"r{index}").num_preemptions for index in range(6)) > 0


def test_a_victim_that_frees_nothing_is_left_alone() -> None:
    """Report S04: preemption stops where it would gain no block, instead of evicting one sequence after the other."""
    host = Host(num_blocks=6, prefix_cache=False)
    host.add(*(request(f"r{index}", 60, 100, family=index) for index in range(3)))
    host.step()
    held = host.blocks.allocate(host.blocks.num_available)
    pinned = [list(entry[1].block_ids) for entry in host.scheduler._running]
    for table in pinned[1:]:
        host.blocks.acquire(table)  # as if the device still needed them
    for _ in range(10):
        host.step()
    assert host.scheduler.stats().num_preemptions == 0
    for table in pinned[1:]:
        host.blocks.release(table)
    for _ in range(10):
        host.step()
    assert host.scheduler.stats().num_preemptions == 1  # one victim was enough
    host.blocks.release(held)
    host.run()
    host.check()


def test_the_last_sequence_sits_out_rather_than_preempt_itself() -> None:
    host = Host(num_blocks=4, prefix_cache=False)
    host.add(request("old", 100, 28), request("young", 120, 80, family=1))
    host.run()
    host.check()
    assert host.scheduler.stats().num_preemptions == 0
    assert [len(plan.decodes) for plan in host.device.plans[8:13]] == [2, 1, 1, 1, 1]


def test_a_victim_waits_for_its_token_in_flight() -> None:
    """A victim whose token is still on the device is not admitted in the same step, even where its blocks would suffice:
    it would sample that token again."""
    host = Host(num_blocks=6, asynchronous=True, prefix_cache=False)
    lengths = {"old1": 60, "old2": 60, "large": 130, "small": 5}
    host.add(*(request(name, length, 20, family=index) for index, (name, length) in enumerate(lengths.items())))
    host.run()
    host.check()
    stats = host.scheduler.stats()
    assert stats.num_preemptions == 2 and end_of(host, "large").num_preemptions == end_of(host, "small").num_preemptions == 1


def test_preemption_clears_all_block_state() -> None:
    """Report S19: after a preemption the row starts with the blocks it got now, and none of before is sent again."""
    host = Host(num_blocks=5, prefix_cache=False)
    host.add(request("old", 60, 200), request("young", 120, 100, family=1))
    tables: dict[int, list[int]] = {}
    sent_again = 0
    while host.core.has_work:
        count = len(host.device.plans)
        host.step()
        for plan in host.device.plans[count:]:
            for row in plan.freed_rows:
                tables.pop(row)
            for new in plan.new_sequences:
                tables[new.row] = []
                sent_again += new.num_output_tokens > 0
            for step in plan.decodes + plan.prefills:
                tables[step.row] += step.new_blocks
                assert len(tables[step.row]) * BLOCK_SIZE >= step.num_computed + step.num_tokens
            flat = [block for table in tables.values() for block in table]
            assert len(flat) == len(set(flat)), "two rows own one block"
    host.check()
    assert sent_again > 0


def test_a_preempted_request_finds_its_own_prefix() -> None:
    host = Host(num_blocks=7)
    host.add(request("old", 60, 250), request("young", 250, 100, family=1))
    host.run()
    host.check()
    again = [
        step
        for plan in host.device.plans
        for step in plan.prefills
        if step.num_computed and any(new.row == step.row and new.num_output_tokens for new in plan.new_sequences)
    ]
    assert again and end_of(host, "young").num_cached_tokens == 0  # usage reports what was known when it came


# ---- where an answer ends


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 7, 11])
def test_counts_are_exact(num_drafts: int, asynchronous: bool, max_tokens: int) -> None:
    """Reports M10, M11, M12: delivered tokens = usage = max_tokens at any draft depth, the first token included, and one
    log probability each."""
    host = Host(num_drafts=num_drafts, asynchronous=asynchronous)
    for index in range(6):
        host.add(request(f"r{index}", 3 + index, max_tokens, family=index, logprobs=0))
    host.run()
    host.check()
    for index in range(6):
        end = end_of(host, f"r{index}")
        assert end.num_output_tokens == len(host.tokens[f"r{index}"]) == max_tokens


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_accepted_drafts_are_cut_behind_the_stop(num_drafts: int, asynchronous: bool) -> None:
    """Reports M02 and M09: ids, log probabilities and counts end at the stop token, wherever in an accepted run it lies."""
    cut = 0
    for token in range(VOCAB):
        host = Host(num_drafts=num_drafts, asynchronous=asynchronous)
        host.add(request("stop", 20, 60, stop_token_ids=[token], logprobs=0), request("eos", 20, 60, eos_token_ids=[token]))
        rows: dict[str, int] = {}
        submit = host.device.submit

        def counting(plan: StepPlan, submit: Any = submit, host: Host = host, rows: dict[str, int] = rows) -> None:
            submit(plan)
            for row in host.device._results[-1].rows:
                name = host.device.rows[row.row].new.request_id
                if name not in host.ends:
                    rows[name] = rows.get(name, 0) + len(row.token_ids)

        host.device.submit = counting  # type: ignore[method-assign]
        host.run()
        host.check()
        stop, eos = end_of(host, "stop"), end_of(host, "eos")
        assert host.tokens["stop"] == host.tokens["eos"]
        if stop.finish_reason == "stop":
            assert (stop.stop_reason, eos.stop_reason) == (token, None)
            cut += rows["stop"] > len(host.tokens["stop"])
    assert cut or (num_drafts == 0 and not asynchronous)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_min_tokens_counts_every_accepted_draft(num_drafts: int) -> None:
    """Report M07: no stop before the minimum, counted per draft position; the first allowed stop ends it."""
    lengths = set()
    for family in range(12):
        host = Host(num_drafts=num_drafts)
        host.add(request("a", 10, 60, family=family, min_tokens=9, stop_token_ids=list(range(0, 40, 3)), eos_token_ids=[1]))
        host.run()
        host.check()
        lengths.add(len(host.tokens["a"]))
    assert min(lengths) == 10 and len(lengths) > 1


def test_an_early_stop_token_does_not_end_it() -> None:
    """The sampler masks stop tokens before min_tokens; should one slip through, the minimum still holds."""
    host = Host()
    free = SamplingParams()
    host.device._sample = lambda row, context: next_token(context, 10, free, [])  # type: ignore[method-assign]
    host.add(request("a", 10, 12, min_tokens=8, stop_token_ids=list(range(VOCAB))))
    host.run()
    assert len(host.tokens["a"]) == 9 and end_of(host, "a").finish_reason == "stop"


def test_ignore_eos() -> None:
    host = Host()
    everything = list(range(VOCAB))
    host.add(request("a", 5, 20, eos_token_ids=everything, ignore_eos=True), request("b", 5, 20, eos_token_ids=everything))
    host.run()
    host.check()
    assert len(host.tokens["a"]) == 20 and len(host.tokens["b"]) == 1
    sent = {new.request_id: new.eos_token_ids for plan in host.device.plans for new in plan.new_sequences}
    assert sent == {"a": [], "b": everything}


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_slots_of_rejected_drafts_return(num_drafts: int) -> None:
    """Report M13: many short requests with drafts over block borders; at idle the pool is full again."""
    host = Host(num_blocks=16, num_drafts=num_drafts, prefix_cache=False)
    for index in range(40):
        host.add(request(f"r{index}", 55 + index % 12, 5 + index % 9, family=index))
        host.step()
    host.run()
    host.check()
    assert host.blocks.num_free == 16


# ---- prefix cache


def test_a_known_prompt_leaves_one_token_to_compute() -> None:
    host = Host()
    host.add(request("a", 128, 3))
    host.run()
    host.add(request("same", 128, 3), request("longer", 129, 3))
    host.run()
    host.check()
    assert end_of(host, "same").num_cached_tokens == 64 and end_of(host, "longer").num_cached_tokens == 128
    assert host.scheduler.stats().prefix_hits == 192 and host.scheduler.stats().prefix_queries == 385


def test_without_prefix_cache_nothing_is_looked_up() -> None:
    host = Host(prefix_cache=False)
    for name in "ab":
        host.add(request(name, 128, 3))
        host.run()
    host.check()
    stats = host.scheduler.stats()
    assert stats.prefix_hits == stats.prefix_queries == stats.num_cached_blocks == 0 and stats.prompt_tokens == 256


def test_output_tokens_are_prefix_too() -> None:
    """The second turn of a conversation finds the first one's answer, but for the token never computed."""
    host = Host()
    host.add(request("turn1", 100, 92))
    host.run()
    history = prompt(100) + host.tokens["turn1"]
    host.add(AddRequest("turn2", [*history, 1, 2, 3], SamplingParams(max_tokens=3), 0.0))
    host.run()
    host.check()
    assert len(history) == 192 and end_of(host, "turn2").num_cached_tokens == 128


def test_speculation_gives_up_the_last_block_of_a_hit() -> None:
    """The draft layer's entry at a block's last slot depends on the next token, which the digest does not cover."""
    host = Host(num_drafts=1)
    host.add(request("a", 200, 3))
    host.run()
    host.add(request("b", 200, 3))
    host.run()
    host.check()
    assert end_of(host, "b").num_cached_tokens == 128


def test_scored_prompts_take_no_hit() -> None:
    host = Host()
    host.add(request("a", 200, 3))
    host.run()
    host.add(request("b", 200, 3, prompt_logprobs=2), request("c", 1, 2, prompt_logprobs=0))
    host.run()
    host.check()
    assert end_of(host, "b").num_cached_tokens == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompt_logprobs_survive_preemption(asynchronous: bool) -> None:
    """Delivered once, with the first token, however often the prefill was started."""
    host = Host(num_blocks=6, asynchronous=asynchronous, prefill_chunk=16)
    host.add(request("old", 60, 200, family=1), request("young", 200, 100, prompt_logprobs=0))
    host.run()
    host.check()
    assert end_of(host, "young").num_preemptions > 0


def test_salted_requests_share_only_with_their_own() -> None:
    """Report X12, through the scheduler: hits under the same salt only."""
    host = Host()
    for name, salt in [("a1", "a"), ("none1", ""), ("a2", "a"), ("b1", "b"), ("none2", "")]:
        host.add(request(name, 100, 2, salt=salt))
        host.run()
    host.check()
    assert {name: end_of(host, name).num_cached_tokens for name in host.ends} == {
        "a1": 0, "none1": 0, "a2": 64, "b1": 0, "none2": 64,
    }  # fmt: skip


def test_times_are_set_in_order() -> None:
    host = Host()
    host.add(request("a", 5, 5))
    outputs = [output for _ in range(5) for output in host.step() if isinstance(output, TokenOutput)]
    first, middle, last = outputs[0], outputs[1], outputs[-1]
    assert 0 < first.scheduled_time <= first.first_token_time and first.finished_time == 0
    assert middle.scheduled_time == middle.first_token_time == middle.finished_time == 0
    assert last.first_token_time == first.first_token_time <= last.finished_time
