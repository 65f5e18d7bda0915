"""What `LLM` gives its users, under the names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass

from engine.output import TokenText


@dataclass(frozen=True)
class Logprob:
    """Log probability of one token under the raw distribution; rank 1 is the best."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice. finish_reason: "stop", "length", "abort", or "error" with the message in `error`.

    stop_reason: the stop string or stop token id that ended it, None for the end of sequence
    logprobs: per token, token id -> Logprob of the chosen token and the asked-for alternatives
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class RequestMetrics:
    """time.time() seconds, over all choices of a request; 0 where it never came to that."""

    arrival_time: float
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float:
        return max(0.0, self.first_scheduled_time - self.arrival_time)

    @property
    def time_to_first_token(self) -> float:
        return max(0.0, self.first_token_time - self.arrival_time)


@dataclass
class RequestOutput:
    """A prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    finished: bool = True


def logprobs_of(entry: TokenText) -> dict[int, Logprob]:
    """The alternatives in order of rank, and the token itself."""
    found = {token_id: Logprob(logprob, rank, token) for rank, (token_id, token, _, logprob) in enumerate(entry.top, start=1)}
    found[entry.token_id] = Logprob(entry.logprob, entry.rank, entry.token)
    return found


def prompt_logprobs_of(entries: list[TokenText | None] | None) -> list[dict[int, Logprob] | None] | None:
    return None if entries is None else [None if entry is None else logprobs_of(entry) for entry in entries]
