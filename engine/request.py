"""One request as the scheduler sees it: its tokens, its counts, and when it ends.

Everything that can be refused is refused here, before the request takes a place in the queue. Knows no other request.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass

import msgspec

from engine.errors import RequestRejected
from engine.messages import AddRequest, TokenLogprob, TokenOutput
from engine.plan import NewSequence


class RequestState(enum.Enum):
    WAITING = "waiting"  # holds neither row nor blocks; also after a preemption
    RUNNING = "running"  # holds a row and blocks
    FINISHED = "finished"  # its terminal message is made; holds nothing


@dataclass(frozen=True)
class RequestLimits:
    """What a request must keep to, in tokens: the context, the whole cache of the replica, and the vocabulary's size."""

    max_model_len: int
    cache_tokens: int
    vocab_size: int


class Request:
    """A live request. Only the scheduler changes it.

    token_ids: prompt, then output tokens the host knows; an array, which the garbage collector need not walk
    num_pending: tokens beyond these that the step in flight has sampled on the device for certain (0 or 1)
    drafts_in_flight: drafts that the step scheduled last verifies; any number of them may be accepted
    num_computed: tokens in the cache once all steps scheduled so far are done, should no draft be accepted. Prefill, decode and resumption after a
        preemption are all "known plus pending minus computed"
    decoding: the ranks hold this row's last token, so a step need not carry it
    stop_ids: tokens that end it once there are more than first_stop tokens, prompt included
    max_total_tokens: prompt and output together at which the request ends with "length"
    digests: chained block digests of the leading full blocks, as far as anyone asked (engine/block_manager.py);
    num_registered: leading blocks of block_ids that are in the prefix map or were found there to be known already
    num_skips: how often a later request took the place this one waits for
    prompt_logprobs: entries so far, None unless asked for or once delivered
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "decoding",
        "digests",
        "drafts_in_flight",
        "eos_token_ids",
        "first_stop",
        "first_token_time",
        "key",
        "max_drafts",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "num_skips",
        "params",
        "prompt_logprobs",
        "request_id",
        "row",
        "salt",
        "scheduled_time",
        "spec_accepted",
        "spec_drafted",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, message: AddRequest, limits: RequestLimits, *, key: tuple[int, int], seed: int, max_drafts: int) -> None:
        """Check and take over a message. key: place in every queue, smaller first; seed: used where the user gave none.

        Raises RequestRejected; the code is "context_length_exceeded", "never_fits" or "invalid_request".
        """
        params = message.params
        params.validate(limits.vocab_size)
        if params.n != 1:
            raise RequestRejected(f"n: a replica runs one choice a request, got n = {params.n}", param="n")
        _check_prompt(message.prompt_token_ids, limits.vocab_size)
        self.request_id = message.request_id
        self.params = params if params.seed is not None else msgspec.structs.replace(params, seed=seed)
        self.arrival = message.arrival
        self.key = key
        self.salt = message.salt
        self.eos_token_ids = [] if params.ignore_eos else list(message.eos_token_ids)
        self.stop_ids = frozenset(self.eos_token_ids).union(params.stop_token_ids)
        if params.min_tokens and params.allowed_token_ids is not None and self.stop_ids.issuperset(params.allowed_token_ids):
            raise RequestRejected(
                "allowed_token_ids: each of them ends the request, so none is left before min_tokens: allow another or lower it",
                param="allowed_token_ids",
            )
        self.token_ids = array("i", message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.first_stop = self.num_prompt_tokens + params.min_tokens
        self.max_total_tokens = _total_tokens(self.num_prompt_tokens, params.max_tokens, limits)
        # A grammar's mask for one position needs the token before it on the host, so there is nothing to verify ahead.
        self.max_drafts = 0 if params.grammar is not None else max_drafts

        self.state = RequestState.WAITING
        self.row = -1
        self.block_ids: list[int] = []
        self.digests: list[bytes] = []
        self.num_registered = 0
        self.num_computed = 0
        self.num_pending = 0
        self.drafts_in_flight = 0
        self.decoding = False
        self.num_skips = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if params.prompt_logprobs is None else [None]

        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.spec_drafted = 0
        self.spec_accepted = 0
        self.scheduled_time = 0.0
        self.first_token_time = 0.0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def accept(self, token_ids: list[int]) -> tuple[int, str | None, int | None]:
        """Append sampled tokens up to and including the one that ends the request; the rest is dropped.

        Returns (tokens kept, finish reason or None, stop reason: the stop token id, None for the end-of-sequence token).
        The sampler keeps stop tokens from being drawn before min_tokens; one that comes all the same ends the request where a
        grammar left nothing else.
        """
        known = self.token_ids
        for kept, token in enumerate(token_ids, 1):
            known.append(token)
            if token in self.stop_ids and (len(known) > self.first_stop or self.params.grammar is not None):
                return kept, "stop", None if token in self.eos_token_ids else token
            if len(known) >= self.max_total_tokens:
                return kept, "length", None
        return len(token_ids), None, None

    def new_sequence(self) -> NewSequence:
        """What the ranks must know of a request that takes a row."""
        return NewSequence(
            row=self.row,
            request_id=self.request_id,
            params=self.params,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            known_token_ids=self.token_ids.tolist() if self.params.needs_history else [],
            eos_token_ids=self.eos_token_ids,
        )

    def output(
        self,
        token_ids: list[int],
        now: float,
        finish_reason: str | None = None,
        stop_reason: int | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> TokenOutput:
        """The message for new tokens; totals always, times on the first and the terminal one."""
        scheduled_time = first_token_time = finished_time = 0.0
        prompt_logprobs = None
        if token_ids and not self.first_token_time:
            self.first_token_time = now
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
            scheduled_time, first_token_time = self.scheduled_time, now
        if finish_reason is not None:
            scheduled_time, first_token_time, finished_time = self.scheduled_time, self.first_token_time, now
        return TokenOutput(
            self.request_id,
            token_ids,
            finish_reason,
            stop_reason,
            logprobs,
            prompt_logprobs,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.num_output_tokens,
            self.num_preemptions,
            scheduled_time,
            first_token_time,
            finished_time,
            self.spec_drafted,
            self.spec_accepted,
        )


def _check_prompt(token_ids: list[int], vocab_size: int) -> None:
    if not token_ids:
        raise RequestRejected("prompt: must have at least one token", param="prompt")
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(t for t in token_ids if type(t) is not int or not 0 <= t < vocab_size)
        raise RequestRejected(f"prompt: token ids must be whole numbers in 0..{vocab_size - 1}, got {wrong!r}", param="prompt")


def _total_tokens(num_prompt_tokens: int, max_tokens: int | None, limits: RequestLimits) -> int:
    """Prompt and output tokens at which a request ends; max_tokens None means as far as context and cache reach."""
    total = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
    if total > limits.max_model_len:
        asked = "at least one token of output" if max_tokens is None else f"max_tokens = {max_tokens}"
        raise RequestRejected(
            f"prompt of {num_prompt_tokens} tokens and {asked} exceed the context of {limits.max_model_len} tokens: "
            "shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
            param="prompt" if num_prompt_tokens >= limits.max_model_len else "max_tokens",
        )
    if total > limits.cache_tokens:
        raise RequestRejected(
            f"prompt of {num_prompt_tokens} tokens and {total - num_prompt_tokens} of output can never fit in a cache of "
            f"{limits.cache_tokens} tokens: shorten the request or give the engine a larger cache",
            code="never_fits",
        )
    return total if max_tokens is not None else min(limits.max_model_len, limits.cache_tokens)
