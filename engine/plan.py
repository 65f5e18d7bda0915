"""What a replica's scheduler tells its ranks each step, and what comes back.

A plan carries differences only: a 128k context must not resend its 2,048 block ids each step. Ranks keep, per row (a
sequence's line in the device tables): its block table, its last token and its sampling state. Everything a rank knows
is a pure function of the plans it received, so all ranks of a replica stay equal.
"""

from __future__ import annotations

import msgspec

from engine.messages import TokenLogprob
from engine.sampling_params import SamplingParams


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a row (first schedule, or again after a preemption).

    params: with seed always set (the leader draws one where the user gave none)
    known_token_ids: prompt then output tokens so far; sent only where sampling needs history (penalties, a
        grammar), else empty
    num_prompt_tokens: how many of the known tokens are the prompt; num_output_tokens: outputs so far (resumption)
    eos_token_ids: empty under ignore_eos
    """

    row: int
    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    num_output_tokens: int = 0
    known_token_ids: list[int] = []
    eos_token_ids: list[int] = []


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step.

    num_computed: tokens valid in the cache before the step; its first query token has this position
    token_ids: the tokens to compute, when the ranks do not know them (prompt chunk, recomputation). Empty means: the
        last token the rank sampled for this row, followed by `num_drafts` of the rank's own draft tokens
    new_blocks: block ids to append to the row's block table
    sample: logits of the last token are sampled (False inside a chunked prompt)
    num_drafts: draft tokens to verify (rows of a decode sequence: 1 + num_drafts)
    drafts_in_flight: drafts of this sequence's step before, whose result the plan does not know yet: num_computed is then
        a lower bound, to which the rank adds those it accepted
    prompt_logprobs: logits of every token are scored against next_token_ids
    next_token_ids: for prompt_logprobs, and for the draft layer under speculation: the known tokens that follow each token
        of the chunk; one fewer than token_ids where the chunk's last token is the last known one
    """

    row: int
    num_computed: int
    token_ids: list[int] = []
    new_blocks: list[int] = []
    sample: bool = True
    num_drafts: int = 0
    prompt_logprobs: int | None = None
    next_token_ids: list[int] = []
    drafts_in_flight: int = 0

    @property
    def num_tokens(self) -> int:
        """Query tokens of this step."""
        return len(self.token_ids) or 1 + self.num_drafts


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """What replicas agree on before a step: the same on every rank of every replica."""

    rows: int  # most lines of any replica; everybody's padded size
    sequences: int  # most decode sequences of any replica
    query_len: int  # lines of every decode sequence, on all replicas
    decode_only: bool  # no replica has prefill rows, so a graph may be replayed
    any_work: bool
    stop: bool = False
    draft_depth: int = 0  # drafts made after the step: the most any replica wants, so that all run as many passes
    prefill_next: bool = False  # the next step may hold prefill, on every replica at once
    capture: bool = False  # every rank captures one more CUDA graph after the step (fast start)
    count_experts: bool = False  # the ranks put their experts' counters together after the step


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step of one replica. decodes have one query row (plus drafts) and run absorbed; prefills run expanded.

    draft_depth: drafts the next step of this replica can use
    wants_prefill: this replica has prompts left to compute after the step
    """

    step: int
    decodes: list[SequenceStep] = []
    prefills: list[SequenceStep] = []
    new_sequences: list[NewSequence] = []
    freed_rows: list[int] = []
    draft_depth: int = 0
    wants_prefill: bool = False
    agreement: Agreement | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prefills)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.decodes) + sum(s.num_tokens for s in self.prefills)

    @property
    def query_len(self) -> int:
        """Lines of every decode sequence, as many as the most drafts that are verified or made: steps with drafts all have the
        shape of their graph. Sequences with fewer drafts are padded."""
        if self.agreement is not None:
            return self.agreement.query_len
        return 1 + max(self.draft_depth, *(s.num_drafts for s in self.decodes)) if self.decodes else 1

    @property
    def num_lines(self) -> int:
        """Lines of the forward pass, padding of decode sequences included."""
        return len(self.decodes) * self.query_len + sum(s.num_tokens for s in self.prefills)


class RowResult(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens of one row: 1 + accepted drafts for a decode row, at most 1 for a prefill row.

    logprobs: one per token if asked; error: this row failed alone (for example NaN logits) and must end
    """

    row: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Results in the plan's order, for rows that sample or score their prompt, and for any row that failed.

    model_seconds is device and launch time of the step. attention_errors: one a layer where the fidelity probe compared.
    """

    step: int
    rows: list[RowResult]
    model_seconds: float = 0.0
    attention_errors: list[float] = []
