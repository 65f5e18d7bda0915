"""Random bodies: whatever comes in is either work or a refusal, never another exception."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestRejected
from engine.hub import resolve_model
from engine.openai_responses import Choice, error_body
from engine.openai_types import ChatCompletionRequest, CompletionRequest, GenerateRequest, TokenizeRequest, parse_request
from engine.served_model import ServedModel

MODEL = ServedModel.load(resolve_model("demo"), name="demo", max_model_len=128)
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, "", "x", "demo", "\x00", "\ufdd0", "🎉", "\ud800",
    "x" * 5000, "{{ 7 * 7 }}", "<｜User｜>", [], [[]], [1], [-1], [[1]], ["a"], ["a", 1], [None], {}, {"a": 1}, {"type": "object"},
    {"type": "text"}, {"type": "json_object"}, {"type": "function"}, {"include_usage": True}, {"1": 5}, {"thinking": True}, "auto", "required",
    [{"role": "user", "content": "Hi"}], [{"role": "user"}], [{"role": "assistant", "tool_calls": [{}]}], [{"role": [], "content": {}}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "tool", "content": "x", "tool_call_id": {}}],
    [{"role": "assistant", "tool_calls": 5, "content": "y"}], [{"role": "assistant", "tool_calls": [5], "content": "y"}],
    [{"role": "user", "content": "x", "name": ["y"]}], [{"role": "assistant", "content": "a", "reasoning_content": 5}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}],
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}, {"json": {"$ref": "#"}}, {"regex": "["}, {"choice": [""]},
    {"type": "function", "function": {"name": "f"}},
]  # fmt: skip
KINDS = {
    CompletionRequest: (MODEL.completion, {"prompt": "Hello"}),
    ChatCompletionRequest: (MODEL.chat, {"messages": [{"role": "user", "content": "Hi"}]}),
    GenerateRequest: (MODEL.generate, {"prompt_token_ids": [5, 6]}),
    TokenizeRequest: (MODEL.tokenize, {"prompt": "Hello"}),
}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bodies_become_work_or_refusals(data: st.DataObject) -> None:
    """Report X14: fields from the schema with values of every kind, alone and together."""
    kind = data.draw(st.sampled_from(list(KINDS)))
    prepare, body = KINDS[kind]
    names = data.draw(st.lists(st.sampled_from(sorted(kind.model_fields)), max_size=4, unique=True))
    fields = {name: data.draw(st.sampled_from(NASTY)) for name in names}
    try:
        work = prepare(parse_request(kind, json.dumps({**body, **fields}).encode()))
    except RequestRejected as error:
        status, answer = error_body(error)
        assert status in (400, 404) and answer["error"]["message"]
        return
    if kind is not TokenizeRequest:
        assert [Choice(MODEL, work, index) for index in range(work.num_choices)]


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_arbitrary_messages(value: Any) -> None:
    for body in (
        {"messages": value},
        {"messages": [value]},
        {"messages": [{"role": "user", "content": value}]},
        {"tools": value, **KINDS[ChatCompletionRequest][1]},
    ):
        try:
            MODEL.chat(parse_request(ChatCompletionRequest, json.dumps(body).encode()))
        except RequestRejected as error:
            assert error_body(error)[0] in (400, 404)
