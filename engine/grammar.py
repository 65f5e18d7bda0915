"""Structured output: a request's schema, regex, choice or grammar as token masks, through llguidance.

The front end builds and checks a grammar (its text travels in SamplingParams.grammar); the replica's leader compiles it
again into one matcher per row and hands packed masks to the sampler once it knows the row's last token. Size and work are
limited by counts, not clocks, so a grammar is accepted or refused alike everywhere. A failure stays in its request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from engine.errors import RequestRejected
from engine.hub import end_token_ids
from engine.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 65536
MAX_CHOICES = 1024
# Between JSON tokens: a space, or a line break with its indentation. Unlimited white space is where weak models get lost.
JSON_SPACE = r"\x20|\x0A[\x20\x09]{0,32}"
# About a quarter of llguidance's own limits: tens of milliseconds to compile, a few per mask.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=250_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


def json_grammar(schema: dict[str, Any] | bool | None, param: str) -> str:
    """Grammar of JSON values that match `schema`; None: any JSON object. param: the field to name in errors."""
    schema = {"type": "object"} if schema is None else schema
    try:
        text = json.dumps(schema)
        _check_size(text, param)
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": JSON_SPACE})
    except (ValueError, RecursionError) as error:
        raise RequestRejected(f"{param}: is no JSON schema: {error}", param=param) from error


def regex_grammar(pattern: str, param: str) -> str:
    """Grammar of texts that match all of a regular expression (Rust syntax: no look-around, no back references)."""
    _check_size(pattern, param)
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: list[str], param: str) -> str:
    """Grammar of exactly one of the given texts."""
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise RequestRejected(f"{param}: needs 1 to {MAX_CHOICES} texts, none empty", param=param)
    return lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices), param)


def lark_grammar(text: str, param: str) -> str:
    """A grammar in llguidance's dialect of Lark."""
    _check_size(text, param)
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def after_reasoning(grammar: str, closing_tag: str, tokenizer: Tokenizer) -> str:
    """The same grammar for text that begins inside reasoning: free until the closing tag, then `grammar`."""
    token_id = tokenizer.token_id(closing_tag)
    if token_id is not None:
        free = f"start: thought <[{token_id}]> @answer\nthought: /(.|\\n)*/"
    else:  # a tag of ordinary tokens ends the text at its first place
        free = f"start: thought @answer\nthought[suffix={json.dumps(closing_tag)}]: /(.|\\n)*/"
    outer = {"name": "outer", "lark_grammar": free}
    return json.dumps({"grammars": [outer, {**json.loads(grammar)["grammars"][0], "name": "answer"}]})


def _check_size(text: str, param: str) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise RequestRejected(f"{param}: at most {MAX_GRAMMAR_BYTES} bytes", param=param)


class GrammarCompiler:
    """Grammars for one tokenizer. The first use builds llguidance's view of the vocabulary (about a second)."""

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int]) -> None:
        """end_ids: tokens that may end a text, allowed where the grammar is complete."""
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocabulary: llguidance.LLTokenizer | None = None
        self.mask_words = (tokenizer.vocab_size + 31) // 32

    @classmethod
    def load(cls, folder: Path, turn_end: int | None = None) -> GrammarCompiler:
        """For a leader, which has no tokenizer otherwise."""
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, end_token_ids(folder, tokenizer, turn_end))

    def check(self, grammar: str, param: str) -> None:
        """Raises RequestRejected with llguidance's reason when the grammar is wrong or too large."""
        problem = llguidance.LLMatcher.validate_grammar(grammar, self._ready(), limits=_LIMITS)
        if problem and not problem.startswith("WARNING"):
            raise RequestRejected(f"{param}: cannot be used for structured output: {problem.splitlines()[0]}", param=param)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of a text. Never raises: a bad grammar shows in `error`."""
        return GrammarMatcher(llguidance.LLMatcher(self._ready(), grammar, log_level=0, limits=_LIMITS), self.mask_words)

    def _ready(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._end_ids))
            self._vocabulary = llguidance.LLTokenizer(
                wrapper, n_vocab=self._tokenizer.vocab_size, eos_token=self._end_ids or None
            )
        return self._vocabulary


class GrammarMatcher:
    """Where one text stands in its grammar. Host memory only; not to be shared between threads."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_words: int) -> None:
        self._matcher = matcher
        self._words = mask_words

    @property
    def error(self) -> str | None:
        """Why no text can follow any more; set once and for good."""
        return self._matcher.get_error().splitlines()[0] if self._matcher.is_error() else None

    @property
    def is_complete(self) -> bool:
        """The text so far satisfies the grammar, so it may end here."""
        return self._matcher.is_accepting()

    def accept(self, token_ids: list[int]) -> bool:
        """Advance by sampled tokens. False (and `error`) when one does not fit; end tokens fit where the text may end."""
        return all(self._matcher.consume_token(token_id) for token_id in token_ids)

    def mask(self) -> npt.NDArray[np.int32]:
        """int32[ceil(vocab / 32)]: bit t % 32 of word t // 32 says whether token t may come next. All ones after an error."""
        if self._matcher.is_error():
            return np.full(self._words, -1, dtype=np.int32)
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: self._words]


class _Vocabulary:
    """The view of a tokenizer that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int]) -> None:
        self.eos_token_id = end_ids[0] if end_ids else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_tokens.values())
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
