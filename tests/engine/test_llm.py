"""`LLM` as Python users meet it: shapes of inputs and outputs, refusals, and an engine that stays clean."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, EngineError, RequestRejected
from engine.llm import LLM, engine_config
from engine.sampling_params import SamplingParams
from models.weights import Checkpoint
from tests.reference_checkpoints import reference_checkpoint, references

VARIANT = "deepseek_v3-tiny"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(reference_checkpoint(VARIANT)), device="cpu", max_model_len=512, num_cache_blocks=60, max_num_seqs=16)


def greedy(count: int = 16, **kw: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **kw})


def clean(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.num_running, stats.num_waiting) == (0, 0) and stats.num_free_blocks + stats.num_cached_blocks == 60


def test_all_shapes_of_prompts_give_the_reference_s_tokens(llm: LLM) -> None:
    refs = references(VARIANT)
    want = [ref.generated[:16] for ref in refs]
    for prompts in (
        [ref.prompt for ref in refs],
        [{"prompt_token_ids": ref.prompt} for ref in refs],
        [tuple(ref.prompt) for ref in refs],
    ):
        got = llm.generate(prompts, greedy(), use_tqdm=False)
        assert [result.outputs[0].token_ids for result in got] == want
        assert [result.prompt_token_ids for result in got] == [ref.prompt for ref in refs]
    assert llm.generate(refs[0].prompt, greedy(), use_tqdm=False)[0].outputs[0].token_ids == want[0]
    (one,) = llm.generate("some text", greedy(), use_tqdm=False)
    (same,) = llm.generate({"prompt": "some text"}, greedy(), use_tqdm=False)
    assert one.prompt == "some text" and one.prompt_token_ids == llm.tokenizer.encode("some text")
    assert one.outputs[0].text == same.outputs[0].text == llm.tokenizer.decode(one.outputs[0].token_ids)
    assert llm.generate([], greedy(), use_tqdm=False) == [] and clean(llm)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    prompt = references(VARIANT)[1].prompt
    results = llm.generate([prompt, prompt], [greedy(3), greedy(9)], use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [3, 9]
    assert all(result.finished and result.outputs[0].finish_reason == "length" for result in results)
    with pytest.raises(RequestRejected, match="sampling_params: 1 for 2 prompts"):
        llm.generate([prompt, prompt], [greedy(3)], use_tqdm=False)


def test_choices_of_a_seed_differ_and_repeat(llm: LLM) -> None:
    """Report P11: seed with n gives n different texts, the same ones in every call."""
    params = SamplingParams(n=3, seed=17, temperature=1.0, max_tokens=12, ignore_eos=True)
    prompt = references(VARIANT)[0].prompt
    first, again = (llm.generate([prompt, prompt], params, use_tqdm=False) for _ in range(2))
    texts = [tuple(choice.token_ids) for choice in first[0].outputs]
    assert [choice.index for choice in first[0].outputs] == [0, 1, 2] and len(set(texts)) == 3
    for result in (first[1], *again):
        assert [tuple(choice.token_ids) for choice in result.outputs] == texts
    free = llm.generate(prompt, SamplingParams(n=3, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
    assert len({tuple(choice.token_ids) for choice in free.outputs}) == 3


BAD = [
    ([], {}, "prompt"),
    ([5, 1 << 20], {}, "prompt"),
    ([5, -1], {}, "prompt"),
    ([5, "x"], {}, "prompt"),
    ([5] * 600, {}, "512"),
    ([5] * 100, {"max_tokens": 500}, "512"),
    ({"text": "x"}, {}, "prompt"),
    (7.5, {}, "prompt"),
    ([5], {"temperature": -1.0}, "temperature"),
    ([5], {"top_p": 0.0}, "top_p"),
    ([5], {"top_k": 0.4}, "top_k"),
    ([5], {"min_p": 1.5}, "min_p"),
    ([5], {"n": 0}, "n"),
    ([5], {"max_tokens": 0}, "max_tokens"),
    ([5], {"stop_token_ids": [1 << 20]}, "stop_token_ids"),
    ([5], {"logit_bias": {1 << 20: 1.0}}, "logit_bias"),
    ([5], {"logprobs": 1000}, "logprobs"),
    ({"prompt_token_ids": None}, {}, "prompt"),
    ({"prompt": 5, "prompt_token_ids": [5]}, {}, "prompt"),
    ({"prompt": "x", "multi_modal_data": {}}, {}, "multi_modal_data"),
    ("word " * 100_000, {}, "prompt: 500000 characters.*512"),
    ([5], {"temperature": 1 << 5000}, "temperature"),
    ([5], {"top_k": 1 << 64}, "top_k: must be at least -1 and at most"),
    ([5], {"n": 1 << 20000}, "n: .* got a number of 20001 bits"),
    ([5], {"stop": "the end"}, "stop: must be a list"),
    ([5], {"stop": None}, "stop: must be a list"),
    ([5], {"stop_token_ids": 5}, "stop_token_ids: must be a list"),
    ([5], {"logit_bias": [5]}, "logit_bias: must be a dict"),
    ([5], {"allowed_token_ids": {5: 6}}, "allowed_token_ids: must be a list"),
    ([5], {"grammar": 5}, "grammar"),
    ([5], {"grammar": "x"}, "grammar"),
    ([5], {"repetition_penalty": 1e-300}, "repetition_penalty"),
    ([5], {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, "allowed_token_ids: each of them ends"),
]


@pytest.mark.parametrize("prompt,fields,names", BAD)
def test_a_bad_request_names_its_fault_and_runs_nothing(
    llm: LLM, prompt: Any, fields: dict, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report P08: every value out of range is refused by name, before any request of the call runs."""
    good = references(VARIANT)[0].prompt
    monkeypatch.setattr(llm._core, "step", lambda: pytest.fail("a step was run"))
    with pytest.raises(RequestRejected, match=names):
        llm.generate([good, prompt], [greedy(), greedy(**fields)], use_tqdm=False)
    monkeypatch.undo()
    assert clean(llm)
    assert llm.generate(good, greedy(), use_tqdm=False)[0].outputs[0].token_ids == references(VARIANT)[0].generated[:16]


def test_an_interrupted_call_leaves_a_clean_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = references(VARIANT)
    step, calls = llm._core.step, []

    def interrupted() -> list:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([ref.prompt for ref in refs], greedy(), use_tqdm=False)
    monkeypatch.undo()
    assert clean(llm)
    got = llm.generate([ref.prompt for ref in refs], greedy(), use_tqdm=False)
    assert [result.outputs[0].token_ids for result in got] == [ref.generated[:16] for ref in refs]


@pytest.mark.parametrize("prompts", [None, 5, np.array([5, 6]), torch.tensor([5, 6]), b"abc"])
def test_what_is_no_list_of_prompts_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestRejected, match="prompt"):
        llm.generate(prompts, greedy(), use_tqdm=False)


@pytest.mark.parametrize("params", ["greedy", {"temperature": 0}, 5, [None], [{"temperature": 0}]])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestRejected, match="sampling_params: must be"):
        llm.generate([[5, 6]], params, use_tqdm=False)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        {},
        "hello",
        ["hello"],
        [[5]],
        [{"role": "user", "content": "word " * 100_000}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestRejected, match="messages"):
        llm.chat(messages, greedy(), use_tqdm=False)


@pytest.mark.parametrize("switches", [5, {"messages": 1}, {"tokenizer": 1}, {"thinking": object()}, {"thinking": "\ud800"}])
def test_template_switches_that_cannot_be_are_refused(llm: LLM, switches: Any) -> None:
    with pytest.raises(RequestRejected, match="chat_template_kwargs"):
        llm.chat([{"role": "user", "content": "x"}], greedy(), use_tqdm=False, chat_template_kwargs=switches)


def test_ctrl_c_within_a_step_waits_for_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal in the middle of a step: half a step would leave the scheduler and the runner apart for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    refs = references(VARIANT)
    submit, calls = llm._core._executor.submit, []

    def interrupted(plan: Any) -> None:
        calls.append(plan)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        submit(plan)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(llm._core._executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([ref.prompt for ref in refs], greedy(), use_tqdm=False)
    monkeypatch.undo()
    assert len(calls) == 3 and clean(llm) and signal.getsignal(signal.SIGINT) is before
    got = llm.generate([ref.prompt for ref in refs], greedy(), use_tqdm=False)
    assert [result.outputs[0].token_ids for result in got] == [ref.generated[:16] for ref in refs]


def test_stop_strings_end_text_and_tokens_together(llm: LLM) -> None:
    (free,) = llm.generate("abc", greedy(24), use_tqdm=False)
    text = free.outputs[0].text
    stop = text[10:13]
    (cut,) = llm.generate("abc", greedy(24, stop=[stop]), use_tqdm=False)
    choice = cut.outputs[0]
    assert choice.finish_reason == "stop" and choice.stop_reason == stop
    assert choice.text == text[: text.index(stop)]
    assert choice.token_ids == free.outputs[0].token_ids[: len(choice.token_ids)] and len(choice.token_ids) < 24
    assert clean(llm)


def test_logprobs_have_the_known_shape(llm: LLM) -> None:
    ref = references(VARIANT)[1]
    (result,) = llm.generate(ref.prompt, greedy(8, logprobs=2, prompt_logprobs=1), use_tqdm=False)
    choice = result.outputs[0]
    exact = ref.logits.double().log_softmax(-1)
    assert choice.logprobs is not None and result.prompt_logprobs is not None
    assert len(choice.logprobs) == 8 and len(result.prompt_logprobs) == len(ref.prompt) and result.prompt_logprobs[0] is None
    for i, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs)):
        line = exact[len(ref.prompt) - 1 + i]
        assert list(entry) == line.topk(2).indices.tolist() and entry[token].rank == 1
        assert abs(entry[token].logprob - float(line[token])) < 1e-3 and entry[token].decoded_token
    for i, entry in enumerate(result.prompt_logprobs[1:]):
        token = ref.prompt[i + 1]
        assert entry is not None and abs(entry[token].logprob - float(exact[i, token])) < 1e-3
        assert entry[token].rank == 1 + int((exact[i] > exact[i, token]).sum())
    total = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs))
    assert choice.cumulative_logprob == pytest.approx(total)
    assert llm.generate(ref.prompt, greedy(2), use_tqdm=False)[0].outputs[0].logprobs is None


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(messages, greedy(), use_tqdm=False)
    two = llm.chat([messages, messages], greedy(), use_tqdm=False)
    assert one.prompt is not None and "hello" in one.prompt
    assert {tuple(r.outputs[0].token_ids) for r in (one, *two)} == {tuple(one.outputs[0].token_ids)}
    with pytest.raises(RequestRejected, match="messages"):
        llm.chat([{"role": "nobody", "content": "x"}], greedy(), use_tqdm=False)


def test_a_grammar_shapes_the_text(llm: LLM) -> None:
    from engine.grammar import regex_grammar

    params = greedy(12, grammar=regex_grammar("(ab|cd){2}x", "grammar"), ignore_eos=False)
    plain, shaped = llm.generate(["q", "q"], [greedy(12), params], use_tqdm=False)
    assert shaped.outputs[0].text in {a + b + "x" for a in ("ab", "cd") for b in ("ab", "cd")}
    assert shaped.outputs[0].finish_reason == "stop"
    assert plain.outputs[0].token_ids == llm.generate("q", greedy(12), use_tqdm=False)[0].outputs[0].token_ids


def test_a_grammar_that_has_ended_wins_over_min_tokens(llm: LLM) -> None:
    """The end is barred while the grammar leaves anything else, and free when it leaves nothing else."""
    from engine.grammar import regex_grammar

    forced = greedy(30, grammar=regex_grammar("(ab|cd){2}x", "grammar"), ignore_eos=False, min_tokens=20)
    barred = greedy(30, grammar=regex_grammar("(ab){0,40}", "grammar"), ignore_eos=False, min_tokens=9)
    ended, going = (result.outputs[0] for result in llm.generate(["q", "q"], [forced, barred], use_tqdm=False))
    assert re.fullmatch("(ab|cd){2}x", ended.text) and ended.finish_reason == "stop"
    assert len(going.token_ids) >= 9 and re.fullmatch("(ab)*a?", going.text)


def test_metrics_are_in_order(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = references(VARIANT)[-1].prompt
    results = llm.generate([prompt] * 2, greedy(4), use_tqdm=False)
    results += llm.generate([prompt], greedy(4), use_tqdm=False)
    for result in results:
        m = result.metrics
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
        assert m.time_in_queue >= 0 and m.time_to_first_token > 0
    assert results[0].num_cached_tokens == 0 and results[2].num_cached_tokens == (len(prompt) - 1) // 64 * 64


def test_the_progress_bar_shows_the_speed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], greedy(4))
    shown = capsys.readouterr().err
    assert "2/2" in shown and "tokens/s" in shown
    llm.generate(["a"], greedy(4), use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "options,words",
    [
        ({"no_such_option": 1}, "no_such_option: no such option; known are"),
        ({"tp": 2}, "tp: LLM runs in one process"),
        ({"dtype": "float16"}, "dtype"),
        ({"cache_format": "fp8"}, "cache_format: the fp8 cache needs kv_lora_rank 512"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"num_cache_blocks": -1}, "num_cache_blocks"),
        ({"cache_memory_bytes": 1000}, "cache_memory_bytes"),
        ({"num_cache_blocks": 10**12}, "num_cache_blocks: .* could fit"),
        ({"num_speculative_tokens": 3, "max_num_batched_tokens": 3}, "max_num_batched_tokens: one sequence needs 4, got 3"),
        ({"speculative_acceptance": "ratio"}, "speculative_acceptance: ratio is for drafts, and num_speculative_tokens is 0"),
        ({"speculative_depth": "fixed"}, "speculative_depth: fixed is for drafts, and num_speculative_tokens is 0"),
        ({"speculative_max_batch": 8}, "speculative_max_batch: 8 is for drafts, and num_speculative_tokens is 0"),
        ({"fast_start": True, "cuda_graphs": False}, "fast_start: .* cuda_graphs is off"),
        ({"fast_start": True}, "fast_start: puts off the capture of CUDA graphs, of which a CPU"),
        ({"speculative_acceptance": "typical"}, "speculative_acceptance: 'typical' is not one of exact, ratio"),
        (
            {"num_speculative_tokens": 1, "speculative_acceptance": "ratio", "speculative_depth": "adaptive"},
            "speculative_depth: under ratio acceptance a seeded request's text depends on the depth",
        ),
        ({"max_num_seqs": 10**9}, "max_num_seqs: at most"),
        ({"memory_fraction": "x"}, "memory_fraction: must be a number"),
        ({"prefix_cache": "no"}, "prefix_cache: must be true or false"),
        ({"served_model_name": 5}, "served_model_name: must be a text"),
        ({"seed": "x"}, "seed: must be a whole number"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cache_memory_bytes" not in options:  # that one needs to know what the model leaves free
        monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(EngineError, match=words) as caught:
        LLM(str(reference_checkpoint(VARIANT)), device="cpu", **options)
    assert isinstance(caught.value, ConfigError)


def test_options_reach_their_config() -> None:
    config = engine_config("m", {"max_num_seqs": 5, "dtype": "bfloat16"})
    assert config.scheduler.max_num_seqs == 5 and config.dtype == "bfloat16" and config.scheduler.max_queued_requests == 0


@pytest.mark.parametrize("model", [None, 5, b"demo", "", "x" * 5000, "~nobody-of-this-name/x"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="model"):
        LLM(model)


@pytest.mark.parametrize(
    "name,content,words",
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is not readable JSON"),
        ("tokenizer_config.json", '{"chat_template": 5}', "tokenizer_config.json: chat_template must be"),
        ("tokenizer_config.json", '{"chat_template": [5]}', "tokenizer_config.json: chat_template must be"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not readable JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id"),
    ],
)
def test_a_tokenizer_that_cannot_work_is_refused_before_weights_are_read(
    tmp_path: Path, name: str, content: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(reference_checkpoint(VARIANT), folder, ignore=shutil.ignore_patterns("reference*"))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), device="cpu")
