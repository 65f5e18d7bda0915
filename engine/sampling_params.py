"""How one request is sampled. A wire value: validated once at the door, then only read."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from engine.errors import RequestRejected

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01  # a division by much less would overflow FP32
_LARGEST_ON_WIRE = 2**63 - 1  # of whole numbers in messages between processes
GREEDY_BELOW = 1e-5  # temperatures under this are greedy; a division by less would overflow FP32


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters under the names users know. `validate` raises RequestRejected naming the field.

    Order of application: penalties and logit_bias, allowed_token_ids, min_tokens, grammar; temperature; then min_p,
    top_k and top_p, each computed on the distribution after temperature, top_k before top_p (top_p counts mass of the
    renormalized top_k set). The best token is always kept.

    n: number of choices; choice i draws with a seed derived from (seed, i)
    temperature: 0 is greedy (so is anything under 1e-5)
    top_k: 0 or -1 keeps all; top_p in (0, 1]; min_p in [0, 1]: drop tokens under min_p times the best probability
    seed: 0 .. 2**63 - 1; noise is keyed by (seed, position) and so independent of the batch
    max_tokens: None means up to the context's end
    min_tokens: no stop token and no end-of-sequence before that many tokens; a grammar that has nothing else left ends all the same
    stop: strings that end the text; removed unless include_stop_str_in_output
    logprobs: None, or how many alternatives beside the chosen token (0 gives the chosen token's only)
    prompt_logprobs: the same for prompt tokens
    logit_bias: token id -> added to its logit, -100 .. 100
    allowed_token_ids: only these may be sampled
    grammar: serialized structured-output grammar (engine/grammar.py), None without
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    grammar: str | None = None

    def validate(self, vocab_size: int) -> None:
        """Check types and ranges; token ids must lie in 0 .. vocab_size - 1."""
        _whole("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _whole("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, None)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _list("stop", self.stop)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _reject("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise _reject("stop", f"each string must have 1 to {MAX_STOP_STRING_CHARS} characters")
        _token_ids("stop_token_ids", self.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        if not isinstance(self.logit_bias, dict):
            raise _reject("logit_bias", f"must be a dict of token id to bias, got {_shown(self.logit_bias)}")
        _token_ids("logit_bias", list(self.logit_bias), vocab_size, MAX_LOGIT_BIAS)
        for bias in self.logit_bias.values():
            _number("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size, vocab_size)
            if not self.allowed_token_ids:
                raise _reject("allowed_token_ids", "must not be empty")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _reject(name, "must be true or false")
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise _reject("grammar", f"must be a serialized grammar (engine/grammar.py), got {_shown(self.grammar)}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_token_counts(self) -> bool:
        """Whether the sampler must know which tokens occurred so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a rank must be told the tokens so far when the sequence takes a row."""
        return self.needs_token_counts or self.grammar is not None

    def for_choice(self, index: int) -> SamplingParams:
        """Parameters of choice `index` of n: n = 1 and, for index > 0, a seed derived from (seed, index)."""
        seed = self.seed
        if seed is not None and index:
            seed = (seed * 0x9E3779B97F4A7C15 + index * 0xD1342543DE82EF95) % 2**63
        return msgspec.structs.replace(self, n=1, seed=seed)


def _reject(name: str, problem: str) -> RequestRejected:
    return RequestRejected(f"{name}: {problem}", param=name)


def _shown(value: Any) -> str:
    """A wrong value as an error shows it; Python refuses to print the longest of numbers."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.60}"


def _whole(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _reject(name, f"must be a whole number, got {_shown(value)}")
    high = _LARGEST_ON_WIRE if high is None else high
    if not low <= value <= high:
        raise _reject(name, f"must be at least {low} and at most {high}, got {_shown(value)}")


def _number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value in (math.inf, -math.inf):
        raise _reject(name, f"must be a finite number, got {_shown(value)}")
    if value > high or value < low or (low_open and value == low):
        raise _reject(name, f"must lie in {'(' if low_open else '['}{low:g}, {high:g}], got {_shown(value)}")


def _list(name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise _reject(name, f"must be a list, got {_shown(value)}; write [...] also around one entry")


def _token_ids(name: str, ids: Any, vocab_size: int, most: int) -> None:
    _list(name, ids)
    if len(ids) > most:
        raise _reject(name, f"at most {most} entries, got {len(ids)}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise _reject(name, f"token ids must lie in 0..{vocab_size - 1}, got {_shown(token)}")
