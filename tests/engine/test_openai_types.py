"""Request bodies: what is refused by name, what becomes which parameter, and every limit before the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.chat_format import ChatFormat
from engine.errors import RequestRejected
from engine.hub import GenerationConfig, resolve_model
from engine.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    parse_request,
)
from engine.served_model import ServedModel, Work

MODEL = ServedModel.load(resolve_model("demo"), name="demo", max_model_len=256)
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def completion(**body: Any) -> Work:
    return MODEL.completion(parse_request(CompletionRequest, {"prompt": "Hello", **body}))


def chat(**body: Any) -> Work:
    return MODEL.chat(parse_request(ChatCompletionRequest, {"messages": MESSAGES, **body}))


def refused(call: Any, message: str, param: str | None = None, **body: Any) -> RequestRejected:
    with pytest.raises(RequestRejected, match=message) as caught:
        call(**body)
    if param is not None:
        assert caught.value.param == param
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("foo", 1), ("best_of", 3), ("suffix", "x"), ("bad_words", ["a"]), ("use_beam_search", True), ("functions", [{}]),
        ("reasoning_effort", "high"), ("chat_template", "{{ x }}"), ("logits_processors", ["x"]), ("prompt_embeds", "x"),
        ("_rank", 0), ("is_child_request", True), ("return_tokens_as_token_ids", True), ("store", True),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(field: str, value: Any) -> None:
    """Reports S09, X18, X22, X23: internal fields, code, embeddings and best_of are no part of the schema."""
    for call in (completion, chat):
        refused(call, f"^{field}: this field is not supported", field, **{field: value})


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 1},
        {"suffix": None},
        {"store": False},
        {"service_tier": "auto"},
        {"user": "me"},
        {"temperature": None},
        {"stop": None},
    ],
)
def test_values_that_change_nothing_are_accepted(body: dict[str, Any]) -> None:
    assert completion(**body).params == completion().params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", "1"), ("temperature", 101), ("top_p", 0), ("top_p", 1.1), ("top_k", 0.4),
        ("top_k", -2), ("min_p", 1.5), ("n", 0), ("n", 129), ("n", True), ("max_tokens", -1), ("max_tokens", 1.5),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", "a"), ("min_tokens", -1),
        ("logprobs", 21), ("prompt_logprobs", -1), ("stop", [""]), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", 5),
        ("logit_bias", {"x": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": "a"}), ("stop_token_ids", [-1]),
        ("ignore_eos", 1), ("stream", "yes"), ("cache_salt", ""), ("priority", 1.5), ("truncate_prompt_tokens", 0),
    ],
)  # fmt: skip
def test_parameters_out_of_range_or_of_wrong_type(field: str, value: Any) -> None:
    """Report P08: each is refused with its name and the limit, never coerced."""
    refused(completion, f"^{field}", field, **{field: value})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": [MODEL.tokenizer.vocab_size]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": [MODEL.tokenizer.vocab_size]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [[1], [10**7]]}, "prompt"),
    ],
)
def test_token_ids_out_of_range(body: dict[str, Any], param: str) -> None:
    """Reports A07, A08, A09: 400 with the range, also for negative ids."""
    refused(completion, param, param, **body)


@pytest.mark.parametrize("prompt", [[], [""], "", [[]], [[1], []], ["a", 1], 5, {"a": 1}, [["a"]], [True], ["x"] * 257])
def test_bad_prompts(prompt: Any) -> None:
    """Report X23: an empty prompt, a list of the wrong things, too many."""
    model = ServedModel("m", MODEL.tokenizer, MODEL.template, MODEL.chat_format, end_ids=MODEL.end_ids, max_model_len=256)
    request = {"prompt": prompt, "add_special_tokens": False}
    with pytest.raises(RequestRejected) as caught:
        model.completion(parse_request(CompletionRequest, request))
    assert caught.value.param == "prompt"


def test_prompt_forms() -> None:
    ids = MODEL.tokenizer.encode("Hello")
    assert completion().prompts[0].token_ids == ids
    assert completion(prompt=ids).prompts[0].token_ids == ids
    both = completion(prompt=["Hello", "World"], n=2)
    assert both.num_choices == 4 and len(both.prompts) == 2
    requests = both.add_requests(1.0)
    assert [r.request_id.rsplit("-", 1)[1] for r in requests] == ["0", "1", "2", "3"]
    assert [r.prompt_token_ids for r in requests] == [ids, ids, both.prompts[1].token_ids, both.prompts[1].token_ids]
    assert all(r.params.n == 1 for r in requests)


def test_seeds_of_choices_differ_and_repeat() -> None:
    """Reports A11, P11: n choices have n seeds derived from the request's; the same every time."""
    first, again = (completion(n=4, seed=-7).add_requests(0.0) for _ in range(2))
    assert [r.params.seed for r in first] == [r.params.seed for r in again]
    assert len({r.params.seed for r in first}) == 4


def test_control_tokens_in_prompts_need_leave() -> None:
    """Report X13."""
    mark = MODEL.tokenizer.control_tokens["<｜User｜>"]
    assert mark not in completion(prompt="<｜User｜>hi").prompts[0].token_ids
    assert mark in completion(prompt="<｜User｜>hi", allow_special_tokens=True).prompts[0].token_ids


def test_defaults_come_from_the_generation_config() -> None:
    model = ServedModel(
        "m", MODEL.tokenizer, MODEL.template, MODEL.chat_format, end_ids=[1], max_model_len=64,
        defaults=GenerationConfig(temperature=0.6, top_p=0.95),
    )  # fmt: skip
    work = model.completion(parse_request(CompletionRequest, {"prompt": "a"}))
    assert (work.params.temperature, work.params.top_p, work.params.max_tokens) == (0.6, 0.95, 16)
    own = model.completion(parse_request(CompletionRequest, {"prompt": "a", "temperature": 0, "top_p": 1}))
    assert (own.params.temperature, own.params.top_p) == (0, 1)


def test_max_tokens_and_the_context() -> None:
    """Reports A17, S17: left out means 16 or the rest of the context; prompt + max_tokens may fill the context exactly."""
    length = len(completion().prompts[0].token_ids)
    assert completion().params.max_tokens == 16
    rest = chat()
    assert rest.params.max_tokens == 256 - len(rest.prompts[0].token_ids)
    assert completion(max_tokens=256 - length).params.max_tokens == 256 - length
    error = refused(completion, "context of 256 tokens", max_tokens=257 - length)
    assert error.code == "context_length_exceeded"
    ids = [5] * 256
    assert completion(prompt=ids[:250]).params.max_tokens == 6
    assert completion(prompt=ids[:255]).params.max_tokens == 1
    assert refused(completion, "256 tokens", prompt=ids).code == "context_length_exceeded"
    assert refused(completion, "characters", prompt="x" * 100_000).code == "context_length_exceeded"
    assert refused(chat, "characters", messages=[{"role": "user", "content": "x" * 100_000}]).code == "context_length_exceeded"


def test_truncation_keeps_the_end() -> None:
    assert completion(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2).prompts[0].token_ids == [7, 8]
    assert len(completion(prompt=[5] * 500, truncate_prompt_tokens=-1).prompts[0].token_ids) == 255


def test_logprob_forms() -> None:
    """Report A03: logprobs true without top_logprobs, and 0, both give the chosen token's."""
    assert completion(logprobs=0).params.logprobs == 0 and completion().params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(logprobs=False).params.logprobs is None
    refused(chat, "needs logprobs", "top_logprobs", top_logprobs=3)
    refused(chat, "logprobs", "logprobs", logprobs=2)


def test_echo_scores_the_prompt() -> None:
    """Report A04: the eval harness's call, max_tokens 0 and 1."""
    work = completion(echo=True, logprobs=1, max_tokens=0)
    assert work.prompt_only and work.echo and work.params.max_tokens == 1 and work.params.prompt_logprobs == 1
    assert not work.show_prompt_logprobs
    assert completion(echo=True).params.prompt_logprobs is None


def test_names_and_stream_options() -> None:
    refused(completion, "'other' is not served here; use 'demo'", "model", model="other")
    assert completion(model="demo").request_id.startswith("cmpl-") and chat().request_id.startswith("chatcmpl-")
    assert completion(rid="mine").request_id == completion(request_id="mine").request_id == "mine"
    refused(completion, "rid: differs", "rid", request_id="a", rid="b")
    refused(completion, "only with stream", "stream_options", stream_options={"include_usage": True})
    streamed = completion(stream=True, stream_options={"include_usage": True})
    assert streamed.include_usage and not streamed.continuous_usage
    work = completion(cache_salt="s", priority=3, data_parallel_rank=1)
    assert (work.salt, work.priority, work.dp_rank) == ("s", 3, 1)
    refused(chat, "differs from max_completion_tokens", max_tokens=1, max_completion_tokens=2)
    assert chat(max_completion_tokens=2).params.max_tokens == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[1]", "JSON object"), (b'{"prompt": NaN}', "not JSON"),
     (b'{"prompt": "a", "x": 1e999}', "not JSON"), (b"[" * 100_000, "not JSON"), (b'{"a":' * 100_000, "not JSON"), (b"{}", "prompt: is required")],
)  # fmt: skip
def test_bodies_that_are_no_requests(body: bytes, message: str) -> None:
    """Report X14."""
    with pytest.raises(RequestRejected, match=message):
        parse_request(CompletionRequest, body)


# ---- chat


def test_switches_of_the_template() -> None:
    """Report T10: the thinking switch reaches the prompt; fields of the template call cannot be passed as switches."""
    on, off = chat(chat_template_kwargs={"thinking": True}), chat(chat_template_kwargs={"enable_thinking": False})
    assert on.prompts[0].text != off.prompts[0].text
    for name in ("messages", "tools", "add_generation_prompt", "tokenizer", "bos_token", "no_such"):
        refused(chat, name, "chat_template_kwargs", chat_template_kwargs={name: "x"})


def test_continuation_flags() -> None:
    """Report T12."""
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    work = chat(messages=messages, continue_final_message=True)
    assert work.prompts[0].text is not None and work.prompts[0].text.endswith("I am")
    refused(chat, "continue_final_message", messages=messages, continue_final_message=True, add_generation_prompt=True)


def test_tools_and_choices() -> None:
    assert chat(tools=[TOOL]).tools is not None and chat(tools=[TOOL]).forced_call is None
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})
    assert named.forced_call == "f" and named.params.grammar is not None
    assert chat(tools=[TOOL], tool_choice="required").forced_call == ""
    refused(chat, "needs tools", "tool_choice", tool_choice="required")
    refused(
        chat, "not among the tools", "tool_choice", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}
    )
    refused(chat, "tool_choice: must be", "tool_choice", tools=[TOOL], tool_choice="sometimes")
    refused(chat, "name", "tools", tools=[{"type": "function", "function": {"name": "bad name"}}])
    refused(chat, "parallel_tool_calls", tools=[TOOL], parallel_tool_calls=False)
    plain = ServedModel("m", MODEL.tokenizer, MODEL.template, ChatFormat(None, None), end_ids=[1], max_model_len=256)
    with pytest.raises(RequestRejected, match="no tool-call format"):
        plain.chat(parse_request(ChatCompletionRequest, {"messages": MESSAGES, "tools": [TOOL]}))


@pytest.mark.parametrize(
    "parameters", [{"type": "objec"}, {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}]
)
def test_malformed_tool_schemas(parameters: dict[str, Any]) -> None:
    """Report X05: a broken pattern or type is refused where it would be used."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    refused(chat, "tools: cannot be used", "tools", tools=[tool], tool_choice="required")


def test_definitions_of_several_tools_are_kept_apart() -> None:
    """References of a tool's schema still resolve in the grammar of a forced call; two meanings of one name are refused."""

    def tool(name: str, kind: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    assert chat(tools=[tool("f", "string"), tool("g", "string")], tool_choice="required").params.grammar is not None
    refused(chat, r"\$defs\.x", "tools", tools=[tool("f", "string"), tool("g", "integer")], tool_choice="required")


# ---- structured output


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
            }
        },
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"json": '{"type": "object"}'}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["yes", "no (really)"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "[0-9]{3}"},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "x"'},
    ],
)
def test_structured_output_forms(body: dict[str, Any]) -> None:
    for call in (completion, chat):
        grammar = call(**body).params.grammar
        assert grammar is not None and json.loads(grammar)["grammars"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": 3}}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_json": {"$ref": "http://example.com/x.json"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "x" * 70_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_bad_structured_output(body: dict[str, Any], param: str) -> None:
    """Report A12: a bad schema, pattern or grammar is a 400 with its field and reason."""
    refused(completion, param, param, **body)


# ---- the other endpoints


def test_tokenize_and_detokenize() -> None:
    body = MODEL.tokenize(parse_request(TokenizeRequest, {"prompt": "Hello 🎉", "return_token_strs": True}))
    assert body["tokens"] == MODEL.tokenizer.encode("Hello 🎉") and body["count"] == len(body["tokens"])
    assert len(body["token_strs"]) == body["count"] and body["max_model_len"] == 256
    messages = MODEL.tokenize(parse_request(TokenizeRequest, {"messages": MESSAGES}))
    assert messages["tokens"] == chat().prompts[0].token_ids
    text = MODEL.detokenize(parse_request(DetokenizeRequest, {"tokens": body["tokens"], "skip_special_tokens": True}))
    assert text == {"prompt": "Hello 🎉"}
    with pytest.raises(RequestRejected, match="out of range"):
        MODEL.detokenize(parse_request(DetokenizeRequest, {"tokens": [10**8]}))
    with pytest.raises(RequestRejected, match="either"):
        MODEL.tokenize(parse_request(TokenizeRequest, {}))


def test_token_in_token_out() -> None:
    """Report T08: stop strings are part of it."""
    work = MODEL.generate(parse_request(GenerateRequest, {"prompt_token_ids": [5, 6], "stop": "x"}))
    assert work.kind == "generate" and work.params.stop == ["x"] and work.params.max_tokens == 254
    with pytest.raises(RequestRejected, match="prompt_token_ids"):
        MODEL.generate(parse_request(GenerateRequest, {"prompt_token_ids": []}))
