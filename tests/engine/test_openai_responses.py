"""Response bodies: streamed and whole answers agree, logprobs in both shapes, usage, finish reasons, errors."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from engine.errors import RequestRejected
from engine.hub import resolve_model
from engine.openai_responses import Choice, chunk_body, error_body, model_list, response_body, usage
from engine.openai_types import ChatCompletionRequest, CompletionRequest, GenerateRequest, parse_request
from engine.served_model import ServedModel, Work
from tests.engine.fake_engine import FakeEngine

MODEL = ServedModel.load(resolve_model("demo"), name="demo", max_model_len=512)
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'


def completion(**body: Any) -> Work:
    return MODEL.completion(parse_request(CompletionRequest, {"prompt": "Hello", "max_tokens": 200, **body}))


def chat(**body: Any) -> Work:
    return MODEL.chat(parse_request(ChatCompletionRequest, {"messages": MESSAGES, **body}))


def run(work: Work, answer: str, tokens_per_step: int = 1) -> tuple[list[dict[str, Any]], dict[str, Any], FakeEngine]:
    """(chunk entries in order, whole response body, engine)."""
    engine = FakeEngine(MODEL.tokenizer, lambda _: answer, tokens_per_step)
    choices = [Choice(MODEL, work, index) for index in range(work.num_choices)]
    by_id = {}
    for request, choice in zip(work.add_requests(0.0), choices):
        engine.add(request)
        by_id[request.request_id] = choice
    entries = [entry for choice in choices if (entry := choice.first_chunk())]
    while engine.has_work:
        for output in engine.step():
            choice = by_id[output.request_id]
            entry = choice.push(output)
            if choice.stopped_by_string:
                engine.abort(output.request_id, "stop")
            entries += [entry] if entry else []
    body = response_body(MODEL, work, choices, created=5.0)
    json.dumps(body, allow_nan=False)
    return entries, body, engine


def joined(entries: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A chat message put together as clients do it."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for entry in entries:
        if entry["index"] != index:
            continue
        delta = entry["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(
                    {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}
                )
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message["content"] = message["content"] if message["content"] or not message["tool_calls"] else None
    return {name: value for name, value in message.items() if name in ("role", "content") or value}


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({}, "Good day 🎉, it is 4 < 5."),
        ({"chat_template_kwargs": {"thinking": True}}, "hm\n</think>\n\nFour"),
        ({"tools": [TOOL]}, f"I look. {CALL}"),
        ({"tools": [TOOL], "chat_template_kwargs": {"thinking": True}}, f"need it</think>{CALL}"),
        ({"stop": ["day"]}, "Good day"),
        ({"tools": [TOOL], "tool_choice": "required"}, '[{"name": "f", "parameters": {"x": 1}}]'),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, '{"x": 1}'),
    ],
)
def test_streamed_and_whole_chat_agree(body: dict[str, Any], answer: str, tokens_per_step: int) -> None:
    """Reports A14, A15, T09: the joined deltas are the message; also when a whole call arrives in one piece."""
    entries, whole, _ = run(chat(**body), answer, tokens_per_step)
    assert joined(entries) == whole["choices"][0]["message"]
    assert entries[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert all(entry["finish_reason"] is None for entry in entries[:-1])
    assert entries[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(entry["delta"] for entry in entries[:-1])


def test_finish_reasons() -> None:
    """Report A15: tool_calls where calls were made, also if the last piece is only the end token."""
    _, body, _ = run(chat(tools=[TOOL]), CALL)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": [1]}'}
    assert run(chat(), "ok")[1]["choices"][0]["finish_reason"] == "stop"
    assert run(chat(max_tokens=2), "one two three four")[1]["choices"][0]["finish_reason"] == "length"
    named = {"type": "function", "function": {"name": "f"}}
    assert run(chat(tools=[TOOL], tool_choice=named), "{}")[1]["choices"][0]["finish_reason"] == "stop"
    entry = run(completion(stop=["two"]), "one two three")[1]["choices"][0]
    assert (entry["text"], entry["finish_reason"], entry["stop_reason"]) == ("one ", "stop", "two")


def test_stop_strings_end_reasoning_too() -> None:
    """Report T05: one stop check for all text; the engine is told once."""
    work = chat(chat_template_kwargs={"thinking": True}, stop=["HALT"])
    _, body, engine = run(work, "thinking HALT more</think>answer")
    message = body["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "thinking" and message["content"] == ""
    assert engine.aborted == [(f"{work.request_id}-0", "stop")]


def test_no_empty_chunks_while_stop_strings_are_held() -> None:
    """Report T07: only the role chunk may be empty."""
    entries, _, _ = run(chat(stop=["Good day to all"]), "Good day to you")
    assert all(entry["delta"].get("content") for entry in entries[1:-1]) and entries[-1]["finish_reason"] == "stop"
    entries, _, _ = run(completion(stop=["Good day to all"], logprobs=0), "Good day to you")
    assert all(entry["text"] for entry in entries[:-1]) and entries[-1]["finish_reason"] == "stop"


def test_n_choices() -> None:
    """Report A11: distinct indices, one result each, prompt tokens counted once a prompt, output tokens summed."""
    work = completion(prompt=["Hello", "World"], n=3, logprobs=0)
    entries, body, _ = run(work, "ok")
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert {entry["index"] for entry in entries} == set(range(6))
    lengths = [len(prompt.token_ids) for prompt in work.prompts]
    output = len(body["choices"][0]["logprobs"]["tokens"])
    assert body["usage"] == {
        "prompt_tokens": sum(lengths),
        "completion_tokens": 6 * output,
        "total_tokens": sum(lengths) + 6 * output,
        "prompt_tokens_details": {"cached_tokens": sum(length // 2 for length in lengths)},
    }


def test_completion_logprobs_join_to_the_text() -> None:
    """Report A05: tokens join to the text, offsets point at them, the chosen token is among the alternatives."""
    for answer in ("plain words", "né 🎉 漢字!"):
        entries, body, _ = run(completion(logprobs=2), answer)
        choice = body["choices"][0]
        scores = choice["logprobs"]
        assert "".join(scores["tokens"]) == choice["text"] == answer
        assert [choice["text"][o : o + len(t)] for o, t in zip(scores["text_offset"], scores["tokens"])] == scores["tokens"]
        assert all(token in top for token, top in zip(scores["tokens"], scores["top_logprobs"]))
        for key in scores:
            assert [value for entry in entries for value in entry["logprobs"][key]] == scores[key]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5])
def test_streamed_completion_logprobs_are_those_of_the_whole(tokens_per_step: int) -> None:
    """Offsets too, where text is held because it may become a stop string, or is cut by one."""
    for answer, stop in itertools.product(("a STOPNOT b ##", "##", "aé日##b", "x STOP"), (["##"], ["STOP", "T b"], ["zz"])):
        for echo in (False, True):
            entries, body, _ = run(completion(stop=stop, logprobs=1, echo=echo), answer, tokens_per_step)
            whole = body["choices"][0]["logprobs"]
            parts = [entry["logprobs"] for entry in entries if entry["logprobs"]]
            assert {name: [value for part in parts for value in part[name]] for name in whole} == whole


def test_echo_and_logprobs() -> None:
    """Reports A04, A05: the first prompt token has no logprob; text, tokens and offsets cover prompt and output, streamed too."""
    prompt_length = len(MODEL.tokenizer.encode("Hello"))
    for answer in ("ok then", "🎉"):
        entries, body, _ = run(completion(echo=True, logprobs=1), answer)
        choice = body["choices"][0]
        assert choice["text"] == "Hello" + answer == "".join(entry["text"] for entry in entries)
        scores = choice["logprobs"]
        assert "".join(scores["tokens"]) == choice["text"]
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        assert all(value is not None for value in scores["token_logprobs"][1:])
        assert len(scores["tokens"]) > prompt_length
        for key in scores:
            assert [value for entry in entries for value in entry["logprobs"][key]] == scores[key]


def test_echo_with_max_tokens_zero() -> None:
    """Report A04: the eval harness's call: prompt scores, no output."""
    for tokens_per_step in (1, 5):
        entries, body, _ = run(completion(echo=True, logprobs=1, max_tokens=0), "dropped", tokens_per_step)
        choice = body["choices"][0]
        assert choice["text"] == "Hello" and body["usage"]["completion_tokens"] == 0
        assert len(choice["logprobs"]["tokens"]) == len(MODEL.tokenizer.encode("Hello"))
        assert choice["finish_reason"] == "length"
        assert [(entry["text"], entry["logprobs"]) for entry in entries] == [("Hello", choice["logprobs"])]
    assert run(completion(max_tokens=0), "dropped")[1]["choices"][0]["text"] == ""


def test_chat_logprobs() -> None:
    """Report A03: an empty top list without top_logprobs; bytes join to the text; streamed entries are the same."""
    for top in (0, 2):
        entries, body, _ = run(chat(logprobs=True, top_logprobs=top), "né 🎉")
        content = body["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == "né 🎉"
        assert content[0]["logprob"] == -1.5
        assert [entry for each in entries if each["logprobs"] for entry in each["logprobs"]["content"]] == content
    work = chat(logprobs=True, tools=[TOOL])
    entries, body, _ = run(work, CALL)
    streamed = [entry for each in entries if each["logprobs"] for entry in each["logprobs"]["content"]]
    assert streamed == body["choices"][0]["logprobs"]["content"]


def test_token_ids_and_prompt_logprobs_on_request() -> None:
    work = completion(return_token_ids=True, prompt_logprobs=1)
    entries, body, _ = run(work, "ok then")
    choice = body["choices"][0]
    assert choice["token_ids"] == [token for entry in entries for token in entry["token_ids"]]
    assert choice["token_ids"][-1] in MODEL.end_ids and choice["prompt_token_ids"] == work.prompts[0].token_ids
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(work.prompts[0].token_ids)
    assert str(work.prompts[0].token_ids[1]) in choice["prompt_logprobs"][1]
    assert entries[0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert "token_ids" not in run(completion(), "ok")[1]["choices"][0]


def test_token_in_token_out_with_stop() -> None:
    """Report T08."""
    ids = MODEL.tokenizer.encode("Hello")
    work = MODEL.generate(parse_request(GenerateRequest, {"prompt_token_ids": ids, "stop": "END", "return_text": True}))
    entries, body, _ = run(work, "abc END def")
    choice = body["choices"][0]
    assert choice["text"] == "abc " and choice["stop_reason"] == "END"
    assert MODEL.tokenizer.decode(choice["token_ids"]) == "abc END"
    assert [token for entry in entries for token in entry["token_ids"]] == choice["token_ids"]


def test_usage_in_streams() -> None:
    """Report A02: usage is null until one last chunk without choices, on both endpoints; absent if not asked for."""
    for make in (completion, chat):
        work = make(stream=True, stream_options={"include_usage": True})
        assert chunk_body(MODEL, work, [{"index": 0}], 1.0)["usage"] is None
        choices = [Choice(MODEL, work, 0)]
        last = chunk_body(MODEL, work, [], 1.0, usage(work, choices))
        assert last["choices"] == [] and last["usage"]["prompt_tokens"] == len(work.prompts[0].token_ids)
        assert "usage" not in chunk_body(MODEL, make(stream=True), [{"index": 0}], 1.0)
    assert chunk_body(MODEL, chat(stream=True), [], 1.0)["object"] == "chat.completion.chunk"


def test_infinite_logprobs_are_valid_json() -> None:
    from engine.messages import TokenLogprob, TokenOutput

    work = chat(logprobs=True)
    choice = Choice(MODEL, work, 0)
    entry = choice.push(TokenOutput("r", [5], finish_reason="length", logprobs=[TokenLogprob(5, float("-inf"), 9)]))
    assert json.loads(json.dumps(entry, allow_nan=False))["logprobs"]["content"][0]["logprob"] == -9999.0


def test_error_bodies() -> None:
    status, body = error_body(RequestRejected("too long", code="context_length_exceeded", param="prompt"))
    assert status == 400 and body["error"]["code"] == "context_length_exceeded" and body["error"]["param"] == "prompt"
    assert error_body(RequestRejected("x", code="queue_full"))[0] == 503
    assert error_body(RequestRejected("x", code="model_not_found"))[0] == 404
    assert error_body(RequestRejected("x", code="internal"))[0] == 500
    assert model_list(MODEL)["data"][0]["max_model_len"] == 512
