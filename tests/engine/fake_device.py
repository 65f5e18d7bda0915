"""A device for host tests: runs plans in order on a cache of token ids, and samples from what it finds there.

The next token is a function of all tokens before it, read through the row's block table. So a block that two sequences
write, a wrong table, a lost or repeated token, or a stale prefix shows as a different text. The rules that every plan must
keep are asserted on the way. No torch.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field

import msgspec

from engine.block_manager import BLOCK_SIZE
from engine.config import SchedulerConfig
from engine.messages import AddRequest, TokenLogprob
from engine.plan import Agreement, NewSequence, RowResult, SequenceStep, StepPlan, StepResult
from engine.sampling_params import SamplingParams

VOCAB = 40
NOTHING = -1


def next_token(context: list[int], num_prompt: int, params: SamplingParams, eos: list[int]) -> int:
    """The one token that may follow; stop tokens are masked before min_tokens, as the sampler does."""
    token = zlib.crc32(array("i", context).tobytes()) % VOCAB
    if len(context) - num_prompt < params.min_tokens:
        while token in params.stop_token_ids or token in eos:  # tests leave at least one token allowed
            token = (token + 1) % VOCAB
    return token


def expected(message: AddRequest, limit: int) -> tuple[list[int], str, int | None]:
    """Output tokens, finish reason and stop reason of a request that runs undisturbed; limit: prompt + output at most."""
    params = message.params
    eos = [] if params.ignore_eos else message.eos_token_ids
    tokens = list(message.prompt_token_ids)
    num_prompt = len(tokens)
    end = limit if params.max_tokens is None else num_prompt + params.max_tokens
    while True:
        token = next_token(tokens, num_prompt, params, eos)
        tokens.append(token)
        if token in eos:
            return tokens[num_prompt:], "stop", None
        if token in params.stop_token_ids:
            return tokens[num_prompt:], "stop", token
        if len(tokens) == end:
            return tokens[num_prompt:], "length", None


@dataclass
class _Row:
    new: NewSequence
    table: list[int] = field(default_factory=list)
    num_computed: int | None = None
    last: int | None = None  # sampled, not computed yet
    drafts: list[int] = field(default_factory=list)


class FakeDevice:
    """fail: request id -> error of its next sampled token. plans: everything submitted, oldest first."""

    def __init__(self, num_blocks: int, config: SchedulerConfig, *, limit: int, num_drafts: int = 0) -> None:
        self.cache = [[NOTHING] * BLOCK_SIZE for _ in range(num_blocks)]
        self.rows: dict[int, _Row] = {}
        self.config = config
        self.limit = limit
        self.num_drafts = num_drafts
        self.fail: dict[str, str] = {}
        self.plans: list[StepPlan] = []
        self.agreement = Agreement(rows=0, sequences=0, query_len=1, decode_only=True, any_work=False)
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert len(self._results) < 2, "more than one plan was in flight"
        self.plans.append(plan)
        self.agreement = msgspec.structs.replace(self.agreement, any_work=not plan.is_empty, prefill_next=plan.wants_prefill)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.new_sequences:
            assert new.row not in self.rows and 0 <= new.row < self.config.max_num_seqs
            assert new.params.seed is not None
            needs_history = new.params.needs_token_counts or new.params.grammar is not None
            assert len(new.known_token_ids) == (new.num_prompt_tokens + new.num_output_tokens if needs_history else 0)
            self.rows[new.row] = _Row(new)
        steps = plan.decodes + plan.prefills
        assert len({step.row for step in steps}) == len(steps)
        results = [self._decode(step) for step in plan.decodes]
        results += [row for row in map(self._prefill, plan.prefills) if row is not None]
        self._results.append(StepResult(plan.step, results, model_seconds=0.5))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def _write(self, row: _Row, start: int, tokens: list[int]) -> list[int]:
        """Put tokens into their slots; returns the whole context as it now stands in the cache."""
        end = start + len(tokens)
        for position, token in enumerate(tokens, start):
            self.cache[row.table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = token
        context = [token for block in row.table for token in self.cache[block]][:end]
        assert NOTHING not in context
        return context

    def _sample(self, row: _Row, context: list[int]) -> int:
        return next_token(context, row.new.num_prompt_tokens, row.new.params, row.new.eos_token_ids)

    def _propose(self, row: _Row, context: list[int]) -> None:
        """Drafts behind the context, about two in three of them right, after a draft pass that writes its own entries."""
        most = self.limit if row.new.params.max_tokens is None else row.new.num_prompt_tokens + row.new.params.max_tokens
        end = len(context) - 1 + max(self.num_drafts - 1, 0)
        assert len(row.table) * BLOCK_SIZE >= min(end, most), "no slots for the draft pass"
        row.drafts = []
        tokens = list(context)
        for _ in range(self.num_drafts):
            right = self._sample(row, tokens)
            tokens.append(right if zlib.crc32(array("i", [*tokens, 7]).tobytes()) % 3 else (right + 1) % VOCAB)
        row.drafts = tokens[len(context) :]

    def _finish(self, step: SequenceStep, row: _Row, tokens: list[int]) -> RowResult:
        logprobs = [TokenLogprob(t, -1.0, 1) for t in tokens] if row.new.params.logprobs is not None else None
        return RowResult(step.row, tokens, logprobs, error=self.fail.get(row.new.request_id))

    def _decode(self, step: SequenceStep) -> RowResult:
        row = self.rows[step.row]
        row.table += step.new_blocks
        assert step.sample and not step.token_ids and row.last is not None
        start = row.num_computed
        assert start is not None
        unknown = start - step.num_computed
        assert 0 <= unknown <= step.drafts_in_flight, "the scheduler and the device disagree about the length"
        assert step.num_computed + step.num_drafts < self.limit
        room = min(len(row.table) * BLOCK_SIZE, self.limit) - start
        if room <= 0:  # it has ended: what it samples is dropped
            return RowResult(step.row, [0])
        drafts = row.drafts[: min(step.num_drafts, room - 1)]
        assert len(drafts) == min(step.num_drafts, room - 1)
        context = self._write(row, start, [row.last, *drafts])
        tokens: list[int] = []
        for accepted in range(len(drafts) + 1):
            tokens.append(self._sample(row, context[: start + 1 + accepted]))
            if accepted < len(drafts) and drafts[accepted] != tokens[-1]:
                break
        row.num_computed = start + len(tokens)
        row.last = tokens[-1]
        self._propose(row, [*context[: row.num_computed], row.last])
        return self._finish(step, row, tokens)

    def _prefill(self, step: SequenceStep) -> RowResult | None:
        row = self.rows[step.row]
        row.table += step.new_blocks
        if row.num_computed is None:
            assert step.num_computed % BLOCK_SIZE == 0  # a prefix hit
        else:
            assert step.num_computed == row.num_computed and row.last is None
        assert step.token_ids
        row.num_computed = step.num_computed + len(step.token_ids)
        context = self._write(row, step.num_computed, step.token_ids)
        if self.num_drafts or step.prompt_logprobs is not None:
            assert len(step.next_token_ids) == len(step.token_ids) - step.sample
        scores = None
        if step.prompt_logprobs is not None:
            scores = [TokenLogprob(token, -1.0, 1) for token in step.next_token_ids]
        if not step.sample:
            return RowResult(step.row, [], prompt_logprobs=scores) if scores is not None else None
        row.last = self._sample(row, context)
        self._propose(row, [*context, row.last])
        result = self._finish(step, row, [row.last])
        return RowResult(step.row, result.token_ids, result.logprobs, scores, result.error)
