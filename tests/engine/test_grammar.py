"""Structured output: masks that allow exactly what the grammar allows, limits, and failures that stay in their request."""

from __future__ import annotations

import json
import random
import re
import time

import numpy as np
import pytest

from engine.errors import RequestRejected
from engine.grammar import (
    GrammarCompiler,
    GrammarMatcher,
    after_reasoning,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from engine.hub import resolve_model
from engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(resolve_model("demo"))
END = TOKENIZER.eos_token_id or 0
COMPILER = GrammarCompiler(TOKENIZER, [END])


def allowed(matcher: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
    return np.flatnonzero(bits).tolist()


def sample(grammar: str, seed: int, most: int = 400) -> str:
    """Text of random allowed tokens until the end token, which is taken as soon as it is allowed half of the time."""
    rng = random.Random(seed)
    matcher = COMPILER.matcher(grammar)
    ids: list[int] = []
    assert matcher.error is None
    for _ in range(most):
        choices = allowed(matcher)
        token = END if END in choices and (len(choices) == 1 or rng.random() < 0.5) else rng.choice(choices)
        assert matcher.accept([token]), matcher.error
        if token == END:
            return TOKENIZER.decode(ids)
        ids.append(token)
    return ""


def test_mask_shape_and_initial_tokens() -> None:
    matcher = COMPILER.matcher(regex_grammar("[ab]x", "r"))
    assert matcher.mask().dtype == np.int32 and matcher.mask().shape == ((TOKENIZER.vocab_size + 31) // 32,)
    assert all(TOKENIZER.decode([token])[0] in "ab" for token in allowed(matcher))
    assert not matcher.is_complete and END not in allowed(matcher)
    assert matcher.accept(TOKENIZER.encode("ax", add_special_tokens=False)) and matcher.is_complete
    assert allowed(matcher) == [END] and matcher.error is None


@pytest.mark.parametrize("seed", range(5))
def test_any_path_through_the_masks_fits(seed: int) -> None:
    """Report A16: whatever the model prefers, the text satisfies the request."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["yes", "no"]}},
        "required": ["n", "k"],
        "additionalProperties": False,
    }
    if text := sample(json_grammar(schema, "s"), seed):
        value = json.loads(text)
        assert set(value) == {"n", "k"} and 0 <= value["n"] <= 99 and value["k"] in ("yes", "no")
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", sample(regex_grammar(r"[0-9]{3}-[a-f]{2}", "r"), seed))
    choices = ["yes", "no (really)", "a.b*c/", "zwölf", 'a "q"\\\n\t', "🎉|"]
    assert sample(choice_grammar(choices, "c"), seed) in choices
    assert sample(lark_grammar('start: "a" ("b" | "c") "d"', "g"), seed) in ("abd", "acd")


def test_white_space_in_json_is_limited() -> None:
    """Published models' layouts pass; a run of line breaks without end does not."""
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}}, "s")
    for text in ("[1,2]", "[1, 2]", "[\n  1,\n\t2\n]"):
        matcher = COMPILER.matcher(grammar)
        assert matcher.accept(TOKENIZER.encode(text, add_special_tokens=False)) and matcher.is_complete
    matcher = COMPILER.matcher(grammar)
    assert not matcher.accept(TOKENIZER.encode("[" + "\n" * 3, add_special_tokens=False))


def test_control_tokens_cannot_be_sampled_as_text() -> None:
    matcher = COMPILER.matcher(regex_grammar(r"(.|\n)*", "r"))
    assert not (set(allowed(matcher)) - {END}) & set(TOKENIZER.control_tokens.values())


@pytest.mark.parametrize("closing", ["</think>", "</unknown_tag>"])
def test_reasoning_is_free_until_its_closing_tag(closing: str) -> None:
    grammar = after_reasoning(choice_grammar(["yes"], "c"), closing, TOKENIZER)
    matcher = COMPILER.matcher(grammar)
    assert matcher.accept(TOKENIZER.encode("so { it\n is", add_special_tokens=False)) and not matcher.is_complete
    assert matcher.accept(TOKENIZER.encode(closing, add_special_tokens=False, allow_special=True))
    assert all("yes".startswith(TOKENIZER.decode([token])) for token in allowed(matcher))
    assert matcher.accept(TOKENIZER.encode("yes", add_special_tokens=False)) and allowed(matcher) == [END]


def test_a_wrong_token_fails_its_matcher_only() -> None:
    """Report A13: two requests with different grammars; one leaves its grammar, the other goes on."""
    bad, good = COMPILER.matcher(regex_grammar("a+", "r")), COMPILER.matcher(regex_grammar("b+", "r"))
    assert not bad.accept(TOKENIZER.encode("zzz", add_special_tokens=False))
    assert bad.error and (bad.mask() == -1).all()
    assert good.accept(TOKENIZER.encode("bb", add_special_tokens=False)) and good.error is None


def test_a_bad_grammar_never_raises_in_the_engine() -> None:
    """Report A12: should one come past the front end, its matcher carries the error."""
    matcher = COMPILER.matcher(lark_grammar("start: nowhere", "g"))
    assert matcher.error and (matcher.mask() == -1).all() and not matcher.accept([5])
    assert COMPILER.matcher("no json at all {").error


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"enum": [f"{i:06d}" * 5 for i in range(1800)]}, "x"),
        json_grammar(
            {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^(a|b)*c{1,9}$"} for i in range(900)}},
            "x",
        ),
        json_grammar(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for i in range(6)]} for j in range(6)]}, "x"
        ),
        regex_grammar("(a{1,1000}){1,1000}", "x"),
        regex_grammar("((a|b|c|d)*e){1,3000}x" * 5, "x"),
        regex_grammar("[ab]*a[ab]{25}", "x"),
        lark_grammar("start: " + " | ".join(f'"{i}x"' for i in range(6000)), "x"),
        lark_grammar('start: a\na: a a | "x"', "x"),
    ],
)
def test_work_per_grammar_is_bounded(grammar: str) -> None:
    """Report A12: large and explosive grammars are compiled or refused soon, never hang the server."""
    started = time.monotonic()
    try:
        COMPILER.check(grammar, "x")
    except RequestRejected:
        assert COMPILER.matcher(grammar).error
    else:
        matcher = COMPILER.matcher(grammar)
        for letter in "aaab":
            matcher.mask()
            matcher.accept(TOKENIZER.encode(letter, add_special_tokens=False))
    assert time.monotonic() - started < 20  # a bound on hanging, not a speed


def test_size_limits() -> None:
    for build in (
        lambda text: regex_grammar(text, "f"),
        lambda text: lark_grammar(text, "f"),
        lambda text: json_grammar({"const": text}, "f"),
    ):
        with pytest.raises(RequestRejected, match=r"f: at most 65536 bytes"):
            build("x" * 70_000)
    with pytest.raises(RequestRejected, match="1 to 1024"):
        choice_grammar(["a"] * 1025, "f")
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestRejected):
        json_grammar({"const": deep}, "f")
