"""Typed messages between a front end (HTTP server or LLM) and the replicas' leaders.

Frozen structs in two tagged unions, decoded with types and unknown fields refused; nothing is pickled. Every accepted
or refused request ends with exactly one terminal message: a TokenOutput with a finish_reason, or a RequestFailed.
"""

from __future__ import annotations

import msgspec

from engine.sampling_params import SamplingParams


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, omit_defaults=True):
    pass


# ---- to a replica


class AddRequest(_Message, frozen=True):
    """Start one choice (params.n is 1). request_id is unique among live requests; arrival is time.time() seconds.

    priority: smaller runs earlier under the priority policy; salt separates prefix caches; eos_token_ids end the
    sequence unless params.ignore_eos.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    eos_token_ids: list[int] = []
    priority: int = 0
    salt: str = ""


class AbortRequest(_Message, frozen=True):
    """Drop a request wherever it is; answered by a terminal TokenOutput with finish_reason "abort" if it was live.

    reason "stop" marks a stop string found by the front end: the request counts as finished, not aborted.
    """

    request_id: str
    reason: str = "abort"


class Ping(_Message, frozen=True):
    """Liveness probe, answered by Pong from a thread of its own, also during a long step."""

    nonce: int


class ResetPrefixCache(_Message, frozen=True):
    """Forget all cached prefixes that no live request uses."""


class Wake(_Message, frozen=True):
    """Another replica got work: leave the idle wait and agree on a step. A hint; losing one costs a tick."""


class Shutdown(_Message, frozen=True):
    """Finish nothing more; abort what is live and end the process tree."""


ToReplica = AddRequest | AbortRequest | Ping | ResetPrefixCache | Wake | Shutdown


# ---- from a replica


class Hello(_Message, frozen=True):
    """First message on every connection of a worker: who speaks, and on which of its two channels.

    channel: "steps" (a leader's requests and outputs) or "heartbeat" (every rank's Ping, Pong, Phase and Shutdown).
    """

    rank: int
    dp_rank: int
    channel: str


class Phase(_Message, frozen=True):
    """A rank entered (seconds is None) or finished a phase of starting up."""

    rank: int
    name: str
    seconds: float | None = None


class Ready(_Message, frozen=True):
    """A replica can serve. Sizes are what the front end validates against."""

    dp_rank: int
    model: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    cache_format: str
    num_speculative_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token, its rank (1 is best), and the best alternatives as (token_id, logprob) pairs."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class TokenOutput(_Message, frozen=True):
    """New tokens of one request; terminal when finish_reason is set ("stop", "length" or "abort").

    stop_reason: the stop token id that ended it (None for the end-of-sequence token), as users of vLLM know it
    prompt_logprobs: once, with the first tokens; the first entry is None
    times (time.time() seconds) are set on the first and the terminal output as they become known
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    spec_drafted: int = 0
    spec_accepted: int = 0


class ReplicaStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load of a replica after a step; counters are totals since start."""

    dp_rank: int = 0
    num_running: int = 0
    num_waiting: int = 0
    reserved_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_per_pos: list[int] = []
    spec_depth: int = 0  # drafts made behind the latest step
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    fidelity_steps: int = 0  # steps in which the fidelity probe compared
    fidelity_mean: list[float] = []  # relative L2 error of each layer's attention over them
    fidelity_worst: list[float] = []


class StepOutput(_Message, frozen=True):
    """All outputs of one step, and the load after it."""

    outputs: list[TokenOutput]
    stats: ReplicaStats


class ExpertLoad(_Message, frozen=True):
    """Rows that every expert of all ranks has computed since start: counts[MoE layer][expert]. From the first replica only."""

    counts: list[list[int]]


class RequestFailed(_Message, frozen=True):
    """Terminal: the request was refused or broke; `code` as in RequestRejected, or "internal"."""

    request_id: str
    message: str
    code: str = "invalid_request"
    param: str | None = None


class EngineFailed(_Message, frozen=True):
    """A replica cannot go on; the front end fails every open request of that replica."""

    dp_rank: int
    message: str


class Pong(_Message, frozen=True):
    """Answer to Ping. last_step_age is seconds since the engine loop last moved."""

    nonce: int
    last_step_age: float
    busy: bool


FromReplica = Hello | Phase | Ready | StepOutput | ExpertLoad | RequestFailed | EngineFailed | Pong
