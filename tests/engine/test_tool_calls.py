"""Reasoning split and tool calls: for every cut of the text the stream's pieces join to the whole text's result."""

from __future__ import annotations

import itertools
import json
import logging
import random

import pytest

from engine.chat_format import ChatFormat, ChatParser, reasoning_is_open
from engine.errors import ConfigError
from engine.hub import resolve_model
from engine.tokenizer import Tokenizer
from engine.tool_calls import ForcedCallParser

TOKENIZER = Tokenizer.load(resolve_model("demo"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
Answer = tuple[str, str, list[tuple[str, str]]]


def parse(chat_format: ChatFormat, pieces: list[str], prompt: str = "", tools: bool = True) -> Answer:
    """(reasoning, content, calls as (name, arguments)) from a text in pieces."""
    parser = ChatParser(chat_format, prompt, TOOLS if tools else None)
    reasoning, content = "", ""
    calls: list[list[str]] = []
    for piece in [*map(parser.push, pieces), parser.finish()]:
        reasoning += piece.reasoning
        content += piece.content
        for call in piece.calls:
            if call.name is not None:
                assert call.index == len(calls) and call.id
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert parser.num_calls == len(calls)
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def every_cut(chat_format: ChatFormat, text: str, prompt: str = "") -> Answer:
    """The one result of every cut in two, of pieces of every size, and of some hundred random cuts in four."""
    whole = parse(chat_format, [text], prompt)
    cuts = [[at] for at in range(len(text) + 1)]
    cuts += [list(range(size, len(text), size)) for size in range(1, len(text))]
    cuts += [sorted(random.Random(seed).choices(range(len(text) + 1), k=3)) for seed in range(100)]
    for borders in cuts:
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *borders, len(text)])]
        assert parse(chat_format, pieces, prompt) == whole, pieces
    return whole


CALL = {
    "deepseek_v31": "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
    "longcat": '<longcat_tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</longcat_tool_call>\n',
}
SECTION = {
    "deepseek_v31": "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
    "longcat": "{}",
}


def text_of(name: str, *arguments: str) -> str:
    return SECTION[name].format("\n".join(CALL[name].format(name="weather", arguments=each) for each in arguments))


@pytest.mark.parametrize("name", CALL)
def test_calls_are_the_same_for_every_cut(name: str) -> None:
    """Reports A14, T15: also in one piece (as drafts deliver it), with arguments that do not end in a quote."""
    text = "Let me look. \n" + text_of(name, '{"city": "Wien"}', '{"days": 3}')
    reasoning, content, calls = every_cut(ChatFormat(None, name), text)
    assert (reasoning, content) == ("", "Let me look.")
    assert calls == [("weather", '{"city": "Wien"}'), ("weather", '{"days": 3}')]


@pytest.mark.parametrize("name", CALL)
def test_text_after_calls_and_braces_in_arguments(name: str) -> None:
    arguments = '{"city": "a `b` ``` </x> <｜ }{", "deep": {"list": [1, {"x": null}]}}'
    _, content, calls = every_cut(ChatFormat(None, name), text_of(name, arguments) + " Done. ")
    assert [json.loads(text) for _, text in calls] == [json.loads(arguments)]
    assert content.strip() == "Done."


@pytest.mark.parametrize("name", CALL)
def test_text_that_only_begins_like_a_call_stays_content(name: str) -> None:
    opening = text_of(name, "{}")[:12]
    for text in (opening, f"a {opening} b", f"{opening}{opening}"):
        assert every_cut(ChatFormat(None, name), text) == ("", text, [])


@pytest.mark.parametrize("name", ["deepseek_v31", "deepseek_v3", "kimi_k2"])
def test_a_call_cut_off_in_its_arguments_stays_a_call(name: str) -> None:
    text = text_of(name, '{"city": "Wien"}')
    text = text[: text.index("Wien")]
    assert every_cut(ChatFormat(None, name), text)[2] == [("weather", '{"city": "')]


def test_a_call_cut_off_before_its_arguments_becomes_content() -> None:
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weath"
    assert every_cut(ChatFormat(None, "deepseek_v31"), text) == ("", "<｜tool▁call▁begin｜>weath", [])
    text = '<longcat_tool_call>\n{"name": "wea'
    assert every_cut(ChatFormat(None, "longcat"), text) == ("", text, [])


def test_malformed_calls_become_content() -> None:
    text = "<longcat_tool_call>not json at all</longcat_tool_call> x"
    assert every_cut(ChatFormat(None, "longcat"), text) == ("", text, [])
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert every_cut(ChatFormat(None, "deepseek_v31"), text) == ("", "<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>", [])


def test_longcats_tagged_pairs() -> None:
    """The later LongCat form: name on the first line; values take the type the tool declares."""
    pairs = {"city": "12", "days": "3", "note": "[1, 2]", "free": "two words"}
    body = "\n".join(
        f"<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>"
        for key, value in pairs.items()
    )
    text = f"<longcat_tool_call>weather\n{body}\n</longcat_tool_call>"
    ((name, arguments),) = every_cut(ChatFormat(None, "longcat"), text)[2]
    assert name == "weather"
    assert json.loads(arguments) == {"city": "12", "days": 3, "note": [1, 2], "free": "two words"}


def test_kimi_keeps_its_own_ids() -> None:
    parser = ChatParser(ChatFormat(None, "kimi_k2"), "", TOOLS)
    piece = parser.push(SECTION["kimi_k2"].format(CALL["kimi_k2"].format(name="a.b", arguments="{}")))
    assert (piece.calls[0].id, piece.calls[0].name) == ("functions.a.b:0", "a.b")


def test_without_tools_marks_stay_text() -> None:
    assert parse(ChatFormat(None, "deepseek_v31"), [V31], tools=False) == ("", V31, [])


# ---- reasoning


@pytest.mark.parametrize(
    ("reasoning", "tags"), [("deepseek", ("<think>", "</think>")), ("longcat", ("<longcat_think>", "</longcat_think>"))]
)
def test_reasoning_is_the_same_for_every_cut(reasoning: str, tags: tuple[str, str]) -> None:
    """Report T06: tags are found however tokens and hold-back cut them."""
    opened, closed = tags
    chat_format = ChatFormat(reasoning, None)
    assert every_cut(chat_format, f"{opened}\nhm < 2 </\n{closed}\n\nIt is 4. ") == ("hm < 2 </", "It is 4. ", [])
    assert every_cut(chat_format, f" \n{opened}a{closed}b") == ("a", "b", [])
    assert every_cut(chat_format, f"{opened}cut off ") == ("cut off ", "", [])


def test_reasoning_the_prompt_has_opened() -> None:
    """Report T09: R1-type templates open the tag themselves, so the text begins inside the reasoning."""
    chat_format = ChatFormat("deepseek", None)
    for prompt in ("<｜Assistant｜><think>", "<｜Assistant｜><think>\n"):
        assert every_cut(chat_format, "because</think>4", prompt) == ("because", "4", [])
    assert reasoning_is_open(chat_format, "<think>\n") == "</think>" and reasoning_is_open(chat_format, "x") is None


def test_thinking_switched_off_or_after_a_tool_result_is_content() -> None:
    """Reports T10, T11: the prompt decides; without an opening tag there is no reasoning."""
    chat_format = ChatFormat("deepseek", "deepseek_v31")
    assert every_cut(chat_format, "four <think> is a tag", "<｜Assistant｜></think>") == ("", "four <think> is a tag", [])
    assert every_cut(chat_format, "It rains.", "<｜tool▁output▁end｜>") == ("", "It rains.", [])
    assert every_cut(chat_format, "  indented") == ("", "  indented", [])


def test_reasoning_then_calls() -> None:
    chat_format = ChatFormat("deepseek", "deepseek_v31")
    assert every_cut(chat_format, "need it</think>\n" + V31, "<think>") == ("need it", "", [("weather", "{}")])
    # A mark inside the reasoning is reasoning.
    assert parse(chat_format, [f"maybe {V31}</think>no"], "<think>") == (f"maybe {V31}", "no", [])


# ---- forced calls


def test_forced_calls_from_json() -> None:
    one = ForcedCallParser("weather")
    pieces = [one.push(letter) for letter in '{"city": 1}']
    assert pieces[0].calls[0].name == "weather" and "".join(p.calls[0].arguments for p in pieces) == '{"city": 1}'
    several = ForcedCallParser(None)
    assert several.push('[{"name": "a", "parameters": {"x": 1}}, {"name": "b", ').calls == []
    several.push('"parameters": {}}]')
    assert [(c.index, c.name, c.arguments) for c in several.finish().calls] == [(0, "a", '{"x": 1}'), (1, "b", "{}")]
    cut = ForcedCallParser(None)
    cut.push('[{"name": "a"')
    assert cut.finish() == ('[{"name": "a"', [])


# ---- choice of formats


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("{{ '<｜tool▁calls▁begin｜>' }}<think>", "deepseek_v3", ("deepseek", "deepseek_v31")),
        ("{{ '<｜tool▁calls▁begin｜>function```json' }}", "deepseek_v3", ("deepseek", "deepseek_v3")),
        ("<|tool_calls_section_begin|>", "kimi_k2", ("deepseek", "kimi_k2")),
        ("<longcat_think>", "longcat_flash", ("longcat", "longcat")),
        ("plain", "deepseek_v2", ("deepseek", None)),
    ],
)
def test_formats_follow_the_model(template: str, model_type: str, expected: tuple[str, str | None]) -> None:
    """Report T15: V3 and V3.1 share a model type; the template tells them apart. (The demo vocabulary has <think>.)"""
    found = ChatFormat.detect(template, TOKENIZER, model_type)
    assert (found.reasoning, found.tools) == expected


def test_a_format_the_model_does_not_know_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Report T15: an operator's choice stands, but not silently."""
    with caplog.at_level(logging.WARNING):
        assert ChatFormat.detect("", TOKENIZER, "deepseek_v3", tools="kimi_k2").tools == "kimi_k2"
    assert "<|tool_calls_section_begin|>" in caplog.text
    assert ChatFormat.detect("", TOKENIZER, "x", reasoning="none", tools="none") == ChatFormat(None, None)
    with pytest.raises(ConfigError, match="tool_call_parser"):
        ChatFormat.detect("", TOKENIZER, "x", tools="hermes")
