"""Which sequences run in the next step, and what their results mean.

Policy, in the order `schedule` applies it:
1. Every running sequence that decodes gets its token, plus its drafts. There are never more rows than the token budget can
   serve, so prefill cannot hold decodes up, and a step's length bounds the time between two tokens.
2. What is left of the budget goes to prompts in queue order, each taking at most half of what is left while others come
   behind it, so that short prompts do not queue behind one long prompt. Unused tokens go round once more.
3. Waiting requests are admitted in queue order: arrival, or (priority, arrival). A request gets the blocks of all its known
   tokens at once, so a prefill never stops half way for want of blocks. Later ones that fit may overtake one that does not,
   max_skips times; then it blocks them and gets what finishing requests give back.

Only decodes ask for more blocks. When there are none, the last sequence of the queue order is preempted: it loses its row
and all its blocks and computes its known tokens again later. A sequence that could only preempt itself sits the step out,
and nobody is preempted whose blocks would not become available. Nothing is admitted in a step that lacked blocks. The
first of the running sequences can always preempt the others, and one request alone always fits (checked by `add`), so
every non-empty schedule moves.

Replicas that step together hold prompts back until their agreement opens the next step for prefill on all of them, so that
a step is decode-only, and a graph, everywhere or nowhere.

One plan may be in flight while the next is made: num_computed advances at schedule time, a sequence whose last token is
still on the device is planned with token_ids empty, and `update` applies results one step late. Rows and blocks are given
away the moment the host lets go of them, although a step in flight may still write there. That is safe because ranks run
plans in order on one stream: the old owner's write comes before the new owner's, who reads only what it wrote itself or
what the prefix map holds; and a block enters that map only in `update`, after the step that filled it has succeeded, and
never again receives a write. Results carry rows, so each plan in flight remembers which request held which row. A request
that was preempted meanwhile is still waiting when the result comes, because nothing preempted is admitted in the same
`schedule`: its tokens count, its blocks are gone.

Under speculation a step adds 1 to 1 + num_drafts tokens, which the host learns from the result. A plan made before it
counts on one: num_computed is a lower bound, to which the ranks add what they accepted, and there are slots for the most
that can be. Such a sequence may have ended already, by a stop token or by length; what it computes then is dropped.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from engine.block_manager import BLOCK_SIZE, BlockManager, blocks_for
from engine.config import SchedulerConfig
from engine.draft_depth import DraftDepth
from engine.errors import ConfigError, RequestRejected, WorkerFailed
from engine.messages import AddRequest, ReplicaStats, RequestFailed, TokenOutput
from engine.plan import RowResult, SequenceStep, StepPlan, StepResult
from engine.request import Request, RequestLimits, RequestState

_RUNNING_PER_SPARE_BLOCK = 8  # admission leaves one block per so many running sequences: about eight steps of growth
_MOST_PASSED = 64  # waiting requests looked at behind the first that does not fit, per step
_LEAST_CHUNK = 256  # beside other prefills no prompt starts with less, since each chunk reads its whole prefix again

_Queue = list[tuple[tuple[int, int], Request]]  # sorted by key; keys are unique
_RUNNING, _FINISHED = RequestState.RUNNING, RequestState.FINISHED  # read per row and step, where enum look-ups would show


@dataclass(slots=True)
class _InFlight:
    """A plan without its result, and the requests that hold the rows of its decodes and prefills, in that order."""

    step: int
    requests: list[Request]


@dataclass(slots=True)
class _Chunk:
    """A prefill's part of the step being planned."""

    request: Request
    num_tokens: int
    new_blocks: list[int]


class Scheduler:
    """Scheduler of one replica. Not thread-safe; `add`, `abort`, `schedule` and `update` are called from one loop.

    seed: makes the seeds of requests that bring none reproducible; None draws them at random
    adaptive_drafts: no drafts for sizes of batches where they were measured not to pay (engine/draft_depth.py)
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        max_model_len: int,
        vocab_size: int,
        num_speculative_tokens: int = 0,
        adaptive_drafts: bool = False,
        dp_rank: int = 0,
        seed: int | None = None,
    ) -> None:
        row_tokens = 1 + num_speculative_tokens
        if config.max_num_batched_tokens < row_tokens:
            raise ConfigError(f"max_num_batched_tokens: one sequence needs {row_tokens}, got {config.max_num_batched_tokens}")
        self._config = config
        self._blocks = blocks
        self._limits = RequestLimits(max_model_len, blocks.num_blocks * BLOCK_SIZE, vocab_size)
        self._num_speculative_tokens = num_speculative_tokens
        self._draft_depth = 0  # drafts the ranks make after the latest plan
        self._depth = DraftDepth(
            num_speculative_tokens,
            adaptive=adaptive_drafts and num_speculative_tokens > 0,
            max_batch=config.speculative_max_batch,
        )
        # The draft pass after a step writes up to this many positions beyond the step's last token.
        self._draft_slots = max(num_speculative_tokens - 1, 0)
        self._chunk_limit = config.prefill_chunk or config.max_num_batched_tokens
        self._least_chunk = min(_LEAST_CHUNK, self._chunk_limit, max(1, config.max_num_batched_tokens // 8))
        self._dp_rank = dp_rank
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()

        self._requests: dict[str, Request] = {}
        self._waiting: _Queue = []
        self._running: _Queue = []
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens // row_tokens)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._freed_rows: list[int] = []  # not told to the ranks yet
        self._in_flight: deque[_InFlight] = deque()

        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._reserved_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._spec_drafts = 0
        self._spec_draft_tokens = 0
        self._spec_accepted_per_pos = [0] * num_speculative_tokens
        self._model_seconds = 0.0

    # ---- requests

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises RequestRejected, and then nothing has changed."""
        if message.request_id in self._requests:
            raise RequestRejected(
                f"request_id: {message.request_id!r} is live already", code="duplicate_request_id", param="request_id"
            )
        limit = self._config.max_queued_requests
        if limit and len(self._waiting) >= limit:
            raise RequestRejected(f"{limit} requests are waiting already: try again later", code="queue_full")
        request = Request(
            message,
            self._limits,
            key=(message.priority if self._config.policy == "priority" else 0, self._num_added),
            seed=self._random.getrandbits(63),
            max_drafts=self._num_speculative_tokens,
        )
        self._num_added += 1
        self._requests[request.request_id] = request
        self._reserved_tokens += len(request.token_ids)
        insort(self._waiting, (request.key, request))

    def abort(self, request_id: str, reason: str = "abort") -> TokenOutput | None:
        """Drop a request wherever it is. Returns its terminal output (reason "stop" finishes it), None if it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._retire(request)
        return request.output([], time.time(), finish_reason="stop" if reason == "stop" else "abort")

    def abort_all(self) -> list[TokenOutput]:
        """Drop every live request."""
        outputs = [self.abort(request_id) for request_id in list(self._requests)]
        return [output for output in outputs if output is not None]

    @property
    def has_work(self) -> bool:
        """Whether any request still waits for its terminal message."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no live request uses."""
        self._blocks.reset_prefix_cache()

    # ---- planning

    def schedule(self, *, prefill: bool = True) -> StepPlan:
        """Plan one step. An empty plan holds nothing the ranks must know and needs no `update`.

        prefill: False plans decodes alone, as replicas that step together do until they have agreed on a step for prompts

        Slots for all query tokens are in the row's block table, and for the draft pass as far as the request can ever get:
        ranks write no draft entry beyond their table.
        """
        if len(self._in_flight) > 1:
            raise RuntimeError("two steps are in flight: update with the older one's result first")
        decodes, requests, prefilling, settled = self._plan_decodes()
        num_drafts = sum(step.num_drafts for step in decodes) if self._num_speculative_tokens else 0
        budget = self._config.max_num_batched_tokens - len(decodes) - num_drafts
        chunks: list[_Chunk] = []
        admitted: list[Request] = []
        if prefill:
            chunks, budget = self._share_among_prefills(prefilling, budget)
            if settled and self._waiting:
                budget = self._admit(chunks, budget)
                admitted = [chunk.request for chunk in chunks[len(prefilling) :]]
            self._spend_rest(chunks, budget)
        prefills = [self._prefill_step(chunk) for chunk in chunks]
        wants_prefill = bool(self._waiting) or any(not request.decoding for request in prefilling)
        if not decodes and not prefills:
            self._depth.interrupt()
            return StepPlan(step=self._num_steps, wants_prefill=wants_prefill)
        requests += [chunk.request for chunk in chunks]
        drafts = any(request.max_drafts for _, request in self._running)
        self._draft_depth = self._depth.choose(len(self._running)) if drafts else 0
        plan = StepPlan(
            step=self._num_steps,
            decodes=decodes,
            prefills=prefills,
            new_sequences=[request.new_sequence() for request in admitted],
            freed_rows=self._freed_rows,
            draft_depth=self._draft_depth,
            wants_prefill=wants_prefill,
        )
        self._freed_rows = []
        self._in_flight.append(_InFlight(self._num_steps, requests))
        self._num_steps += 1
        return plan

    def _plan_decodes(self) -> tuple[list[SequenceStep], list[Request], list[Request], bool]:
        """Steps of the decoding sequences and who they are; running prefills; whether there were blocks for everybody."""
        steps: list[SequenceStep] = []
        requests: list[Request] = []
        prefilling: list[Request] = []
        settled = True
        for _, request in tuple(self._running):
            if request.state is not _RUNNING:
                break  # this one and all behind it have just been preempted
            if not request.decoding:
                prefilling.append(request)
                continue
            pending = request.num_pending
            left = request.max_total_tokens - len(request.token_ids) - pending
            if left <= 0 or (pending and request.params.grammar is not None):
                continue  # ends by length with the token in flight; or its next mask needs that token on the host
            start = request.num_computed
            drafts = min(request.max_drafts, self._draft_depth)
            if drafts >= left:
                drafts = left - 1
            unknown = request.drafts_in_flight if pending else 0
            slots = min(start + unknown + 1 + drafts + self._draft_slots, request.max_total_tokens)
            if slots > len(request.block_ids) * BLOCK_SIZE:
                num_preemptions = self._num_preemptions
                new_blocks = self._grow(request, slots)
                settled = settled and new_blocks is not None and num_preemptions == self._num_preemptions
                if new_blocks is None:
                    continue
                steps.append(SequenceStep(request.row, start, [], new_blocks, num_drafts=drafts, drafts_in_flight=unknown))
            else:
                steps.append(SequenceStep(request.row, start, num_drafts=drafts, drafts_in_flight=unknown))
            # Accepted drafts are added by `update`; a rejected one leaves nothing behind but slots that are written again.
            request.num_computed = start + 1
            request.num_pending = pending + 1
            request.drafts_in_flight = drafts
            requests.append(request)
        return steps, requests, prefilling, settled

    def _grow(self, request: Request, num_slots: int) -> list[int] | None:
        """Blocks that extend a running sequence to num_slots slots, preempting from the end of the order; None: not now."""
        needed = blocks_for(num_slots) - len(request.block_ids)
        while needed > self._blocks.num_available:
            victim = self._running[-1][1]
            if victim is request or not self._blocks.num_released_by(victim.block_ids):
                return None
            self._preempt(victim)
        new_blocks = self._blocks.allocate(needed)
        request.block_ids += new_blocks
        return new_blocks

    def _preempt(self, request: Request) -> None:
        """Back to the queue, to compute all known tokens again. A token in flight still counts when it arrives."""
        self._running.pop()
        self._let_go(request)
        request.state = RequestState.WAITING
        request.num_computed = request.num_pending = request.num_registered = request.num_skips = 0
        request.decoding = False
        request.num_preemptions += 1
        self._num_preemptions += 1
        insort(self._waiting, (request.key, request))

    def _share(self, remaining: int, budget: int, others_behind: bool) -> int:
        """Tokens a prompt with `remaining` tokens to go takes of the budget at first."""
        return min(remaining, self._chunk_limit, (budget + 1) // 2 if others_behind else budget)

    def _share_among_prefills(self, prefilling: list[Request], budget: int) -> tuple[list[_Chunk], int]:
        """First shares of the prompts that run already. Each gets at least one token, since rows never exceed the budget."""
        chunks = []
        for behind, request in zip(range(len(prefilling) - 1, -1, -1), prefilling):
            share = self._share(len(request.token_ids) - request.num_computed, budget, behind > 0 or bool(self._waiting))
            share = min(share, budget - behind)
            chunks.append(_Chunk(request, share, []))
            budget -= share
        return chunks, budget

    def _spend_rest(self, chunks: list[_Chunk], budget: int) -> None:
        """Hand out what first shares left over, in queue order."""
        for chunk in chunks:
            remaining = len(chunk.request.token_ids) - chunk.request.num_computed
            more = min(budget, min(remaining, self._chunk_limit) - chunk.num_tokens)
            chunk.num_tokens += more
            budget -= more

    def _admit(self, chunks: list[_Chunk], budget: int) -> int:
        """Start waiting requests, appending their first chunks. Returns the budget left."""
        waiting, max_skips = self._waiting, self._config.max_skips
        passed: list[Request] = []
        now = time.time()
        while budget and self._free_rows and len(passed) < len(waiting) and len(passed) <= _MOST_PASSED:
            request = waiting[len(passed)][1]
            chunk = self._start(request, budget, bool(chunks), bool(passed))
            if chunk is None:
                if request.num_skips >= max_skips:
                    break
                passed.append(request)
                continue
            del waiting[len(passed)]
            insort(self._running, (request.key, request))
            request.scheduled_time = request.scheduled_time or now
            chunks.append(chunk)
            budget -= chunk.num_tokens
            for other in passed:
                other.num_skips += 1
            if any(other.num_skips >= max_skips for other in passed):
                break
        return budget

    def _start(self, request: Request, budget: int, beside_others: bool, overtakes: bool) -> _Chunk | None:
        """Give a waiting request a row, its known prefix and blocks for all its known tokens; None if it does not fit now."""
        num_tokens = len(request.token_ids)
        total = blocks_for(min(num_tokens + self._draft_slots, request.max_total_tokens))
        room = self._blocks.num_available - len(self._running) // _RUNNING_PER_SPARE_BLOCK
        if overtakes and total > room:
            return None  # perhaps shared blocks would make it fit, but only the first may cost a search at every step
        hits = self._known_prefix(request)
        num_hit = len(hits) * BLOCK_SIZE
        if total - self._blocks.num_shared(hits) > room:
            return None
        share = self._share(num_tokens - num_hit, budget, len(self._waiting) > 1)
        if beside_others and share < min(num_tokens - num_hit, self._least_chunk):
            return None
        self._blocks.acquire(hits)
        request.block_ids = hits + self._blocks.allocate(total - len(hits))
        request.num_registered = len(hits)
        request.num_computed = num_hit
        request.row = self._free_rows.pop()
        request.state = _RUNNING
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # a prefill that was preempted half way scores its prompt again
        if not request.num_preemptions:
            request.num_cached_tokens = num_hit
            self._prompt_tokens += num_tokens
            if self._blocks.prefix_cache:
                self._prefix_queries += num_tokens
                self._prefix_hits += num_hit
        return _Chunk(request, share, list(request.block_ids))

    def _known_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest known prefix that leaves a token to compute; none while the prompt is to be scored.

        With a draft layer the last one is given up: its last draft entry depends on a token its digest does not cover. An
        inner block may still hold another continuation's entry there, which can cost an accepted draft, never a token.
        """
        if request.prompt_logprobs is not None:
            return []
        most = (len(request.token_ids) - 1) // BLOCK_SIZE
        hits = self._blocks.match(request.digests, request.token_ids, request.salt, most)
        return hits[:-1] if self._num_speculative_tokens else hits

    def _prefill_step(self, chunk: _Chunk) -> SequenceStep:
        request = chunk.request
        start = request.num_computed
        end = start + chunk.num_tokens
        last = end == len(request.token_ids)
        scores = request.prompt_logprobs is not None
        follows = request.token_ids[start + 1 : end + 1].tolist() if scores or self._num_speculative_tokens else []
        request.num_computed = end
        if last:
            request.decoding = True
            request.num_pending = 1
            request.drafts_in_flight = 0
        return SequenceStep(
            row=request.row,
            num_computed=start,
            token_ids=request.token_ids[start:end].tolist(),
            new_blocks=chunk.new_blocks,
            sample=last,
            prompt_logprobs=request.params.prompt_logprobs if scores else None,
            next_token_ids=follows,
        )

    # ---- results

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenOutput | RequestFailed]:
        """Apply the result of the oldest plan in flight. Returns new tokens and terminal messages, in the plan's order.

        Raises WorkerFailed when the result does not belong to the plan.
        """
        if plan.is_empty:
            return []
        flight = self._in_flight.popleft()
        if not flight.step == plan.step == result.step:
            raise WorkerFailed(f"step {flight.step} is due; got the result of step {result.step} for plan {plan.step}")
        self._model_seconds += result.model_seconds
        rows = {row.row: row for row in result.rows}
        now, before = time.time(), self._generation_tokens
        outputs: list[TokenOutput | RequestFailed] = []
        steps = plan.decodes + plan.prefills if plan.prefills else plan.decodes
        for request, step in zip(flight.requests, steps):
            if request.state is _FINISHED:
                continue  # aborted, or ended by the step before
            row = rows.get(step.row)
            if row is None:
                if step.sample or step.prompt_logprobs is not None:
                    raise WorkerFailed(f"step {result.step} has no result for row {step.row}")
            elif row.error is not None:
                self._retire(request)
                self._blocks.forget(request.digests)
                outputs.append(RequestFailed(request.request_id, row.error, code="internal"))
                continue
            elif row.prompt_logprobs is not None and request.prompt_logprobs is not None:
                request.prompt_logprobs += row.prompt_logprobs
            if step.sample and row is not None:
                outputs.append(self._accept(request, step, row, now))
            elif request.state is _RUNNING:
                self._register(request, step.num_computed + step.num_tokens)
        if plan.prefills:
            self._depth.interrupt()
        else:
            num_tokens, drafting = self._generation_tokens - before, any(step.num_drafts for step in plan.decodes)
            self._depth.observe(len(plan.decodes), drafting, num_tokens, time.perf_counter())
        return outputs

    def _accept(self, request: Request, step: SequenceStep, row: RowResult, now: float) -> TokenOutput:
        """Take a row's sampled tokens, drop those behind the end, and finish the request if this is its end."""
        sampled = row.token_ids
        if not 1 <= len(sampled) <= 1 + step.num_drafts:
            raise WorkerFailed(f"row {step.row}: {len(sampled)} tokens for {step.num_drafts} drafts")
        kept, finish_reason, stop_reason = request.accept(sampled)
        logprobs = row.logprobs
        if kept < len(sampled):
            sampled = sampled[:kept]
            logprobs = logprobs[:kept] if logprobs is not None else None
        self._reserved_tokens += kept
        self._generation_tokens += kept
        if step.num_drafts:
            self._count_drafts(request, step.num_drafts, kept - 1)
        if request.state is _RUNNING:
            request.num_pending -= 1
            request.num_computed += kept - 1
            num_valid = len(request.token_ids) - 1  # the last token is not computed yet
            if num_valid // BLOCK_SIZE > request.num_registered:
                self._register(request, num_valid)
        if finish_reason is not None:
            self._retire(request)
        return request.output(sampled, now, finish_reason, stop_reason, logprobs)

    def _count_drafts(self, request: Request, drafted: int, accepted: int) -> None:
        request.spec_drafted += drafted
        request.spec_accepted += accepted
        self._spec_drafts += 1
        self._spec_draft_tokens += drafted
        for position in range(accepted):
            self._spec_accepted_per_pos[position] += 1

    def _register(self, request: Request, num_valid: int) -> None:
        """Make the blocks findable that num_valid tokens, now computed and accepted, fill."""
        full = num_valid // BLOCK_SIZE
        if full > request.num_registered and self._blocks.prefix_cache:
            self._blocks.extend_digests(request.digests, request.token_ids, request.salt, full)
            for index in range(request.num_registered, full):
                self._blocks.register(request.block_ids[index], request.digests[index])
            request.num_registered = full

    def _retire(self, request: Request) -> None:
        """Take a request out of every structure. Its terminal message is the caller's to make."""
        queue = self._running if request.state is _RUNNING else self._waiting
        del queue[bisect_left(queue, request.key, key=lambda entry: entry[0])]
        if request.state is _RUNNING:
            self._let_go(request)
        request.state = _FINISHED
        self._reserved_tokens -= len(request.token_ids)
        del self._requests[request.request_id]

    def _let_go(self, request: Request) -> None:
        """The one place where a running request gives back its row and blocks."""
        self._blocks.release(request.block_ids)
        self._freed_rows.append(request.row)
        self._free_rows.append(request.row)
        request.row = -1

    # ---- figures

    def stats(self) -> ReplicaStats:
        """Load now and totals since start. reserved_tokens: known tokens of all live requests; prefix_* count tokens."""
        return ReplicaStats(
            dp_rank=self._dp_rank,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            reserved_tokens=self._reserved_tokens,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free,
            num_cached_blocks=self._blocks.num_cached,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            spec_drafts=self._spec_drafts,
            spec_draft_tokens=self._spec_draft_tokens,
            spec_accepted_per_pos=list(self._spec_accepted_per_pos),
            spec_depth=self._draft_depth,
            model_seconds=self._model_seconds,
        )
