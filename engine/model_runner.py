"""Executes step plans on one rank: plan -> ForwardBatch -> logits -> tokens -> drafts.

Owns the device tables of the rows: block tables, last tokens and sampling parameters, a pure function of the plans received.
Sampled tokens stay on the device for the next step, so a plan may follow before the host has seen the last result. `run`
only enqueues work; `PendingStep.wait` brings the result. Does not schedule, and knows no other replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from engine.cuda_graph import GraphRunner, Key, capture_sizes
from engine.fidelity import FidelityProbe
from engine.kv_cache import KVCache
from engine.logprobs import TokenScores, score
from engine.messages import TokenLogprob
from engine.plan import RowResult, StepPlan, StepResult
from engine.sampling_state import Matcher, SamplingState
from engine.speculative import Drafter, DraftRows
from engine.staging import HostCopy, to_device
from kernels import ops
from kernels.layout import BLOCK_SIZE, DecodePlan
from models.batch import AttentionMetadata, ContextPiece, ForwardBatch, PrefillMetadata
from models.causal_lm import CausalLM
from models.config import ModelConfig
from models.parallel import ParallelContext

CONTEXT_TOKENS = 8192  # cached tokens expanded at once before a prefill chunk; bounds the workspace of long contexts
_SCORED_BYTES = 64 << 20  # logits held at once for log probabilities

BROKEN_ROW = "the model's output for this sequence is not finite, or no token is allowed"


@dataclass(frozen=True)
class _Scored:
    """Log probabilities of consecutive lines of one kind: sampled rows, or a chunk of one sequence's prompt."""

    rows: list[int]  # row of each line
    tokens: torch.Tensor
    scores: TokenScores

    def tensors(self) -> list[torch.Tensor]:
        s = self.scores
        return [self.tokens, s.logprob, s.rank, s.top_ids, s.top_logprobs]


@dataclass
class PendingStep:
    """A step whose device work is enqueued. Only the leader's holds a result worth waiting for."""

    plan: StepPlan
    sampled_rows: list[int]  # row of each sampled line; the lines of a decode sequence follow each other
    prompt_tops: dict[int, int]  # row -> alternatives wanted for its prompt tokens
    sampled_tops: dict[int, int]
    copies: HostCopy
    num_scored: list[tuple[bool, list[int]]]  # (of a prompt?, row of each line), in the order of the copies
    timer: _Timer
    errors: dict[int, str] = field(default_factory=dict)  # row -> why its grammar allows nothing
    compared: bool = False  # whether the copies end with the layers' attention errors

    @property
    def done(self) -> bool:
        """Whether the device has finished the step."""
        return self.copies.done

    def tokens(self) -> list[int]:
        """Sampled tokens in the order of sampled_rows, -1 for a broken line."""
        return self.copies.wait()[0].tolist()

    def wait(self) -> StepResult:
        """Block until the device is done, and write the result in the plan's order."""
        copied = iter(self.copies.wait())
        lines: dict[int, list[int]] = {}
        for row, token in zip(self.sampled_rows, next(copied).tolist()):
            lines.setdefault(row, []).append(token)
        for step, accepted in zip(self.plan.decodes, next(copied).tolist()):  # none where no drafts were verified
            del lines[step.row][accepted + 1 :]
        sampled: dict[int, list[TokenLogprob]] = {}
        prompts: dict[int, list[TokenLogprob]] = {}
        for of_prompt, rows in self.num_scored:
            tops, into = (self.prompt_tops, prompts) if of_prompt else (self.sampled_tops, sampled)
            columns: list[list] = [next(copied).tolist() for _ in range(5)]
            for row, token, logprob, rank, ids, values in zip(rows, *columns):
                entry = TokenLogprob(token, logprob, rank, list(zip(ids, values))[: tops[row]])
                into.setdefault(row, []).append(entry)
        results = []
        for step in (*self.plan.decodes, *self.plan.prefills):
            tokens = lines.get(step.row, [])
            if not tokens and step.row not in prompts:
                continue
            broken = -1 in tokens
            logprobs = sampled.get(step.row)
            results.append(
                RowResult(
                    step.row,
                    [] if broken else tokens,
                    logprobs=None if broken or logprobs is None else logprobs[: len(tokens)],
                    prompt_logprobs=prompts.get(step.row),
                    error=self.errors.get(step.row, BROKEN_ROW) if broken else None,
                )
            )
        errors = next(copied).tolist() if self.compared else []
        return StepResult(self.plan.step, results, self.timer.seconds(), errors)


class _Timer:
    """Seconds between construction and `stop`: on the device where there is one, else on the host."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        self._start = time.perf_counter()
        self._host_seconds = 0.0

    def stop(self) -> None:
        self._host_seconds = time.perf_counter() - self._start
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        if self._events is None:
            return self._host_seconds
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


class _Sequences(NamedTuple):
    """What a step is told of its B decode sequences, int64 [B] each; the rows of one array.

    row: of the tables; start: position of the first line; num_drafts: to verify
    in_flight: 1 where `start` is a lower bound, to which the accepted drafts of the step before come
    num_slots: in the row's block table, 0 for a padded sequence; token: of the first line, -1: the one sampled last
    """

    row: torch.Tensor
    start: torch.Tensor
    num_drafts: torch.Tensor
    in_flight: torch.Tensor
    num_slots: torch.Tensor
    token: torch.Tensor


@dataclass(frozen=True)
class _Chunks:
    """The prompt chunks of a step, L lines.

    ids, positions, slots, next_ids: int64 [L]; next_ids: the token after each line (draft layer), 0 where it is sampled
    sampled: int64 [N] lines whose next token is sampled, with their rows and slots in the block table, int64 [N]
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    next_ids: torch.Tensor
    sampled: torch.Tensor
    rows: torch.Tensor
    num_slots: torch.Tensor
    metadata: PrefillMetadata


class _Done(NamedTuple):
    """What a step leaves: hidden states [T, D]; tokens int64 [n] of all sampled lines, those of the decode sequences first, -1
    for a broken line; accepted int64 [B] drafts of each decode sequence, empty where none were verified."""

    hidden: torch.Tensor
    tokens: torch.Tensor
    accepted: torch.Tensor


class ModelRunner:
    """One rank's model, cache and row tables.

    num_speculative_tokens: drafts made for every sampled sequence; needs a model with its MTP head
    ratio_acceptance: accept them by ratio rather than by equality (engine/speculative.py)
    matcher: makes the Matcher of a request's grammar; None where grammars are refused
    probe: compares attention with exact attention in some steps (engine/fidelity.py)
    """

    def __init__(
        self,
        model: CausalLM,
        model_config: ModelConfig,
        cache: KVCache,
        parallel: ParallelContext,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        context_tokens: int = CONTEXT_TOKENS,
        num_speculative_tokens: int = 0,
        ratio_acceptance: bool = False,
        matcher: Callable[[str], Matcher] | None = None,
        probe: FidelityProbe | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.parallel = parallel
        self._vocab_size = model_config.vocab_size
        self._local_heads = model_config.num_heads // parallel.tp
        self._context_tokens = max(BLOCK_SIZE, context_tokens // BLOCK_SIZE * BLOCK_SIZE)
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // BLOCK_SIZE)
        # The host's copy of the table turns positions into slots; the device's serves attention. Both follow the plans.
        self._host_table = np.full((max_num_seqs, max_blocks), cache.null_block, dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._max_slots = np.zeros(max_num_seqs, dtype=np.int64)  # tokens of a row that are ever computed
        rows = max_num_seqs + 1  # the last one pads
        self._block_table = torch.full((rows, max_blocks), cache.null_block, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(rows, dtype=torch.int64, device=device)  # drafts, in the row's last verification
        self._leads = parallel.tp_rank == 0
        self._sampling = SamplingState(self._vocab_size, max_num_seqs, device, matcher)
        self._unmatched: list[tuple[PendingStep, int, Matcher]] = []  # (step, line, matcher) of tokens no grammar has seen
        self._graphs: GraphRunner[_Done] | None = None
        self._probe = probe
        self._drafter: Drafter | None = None
        if num_speculative_tokens:
            self._drafter = Drafter(
                model,
                self._sampling.table,
                depth=num_speculative_tokens,
                ratio=ratio_acceptance,
                num_heads=self._local_heads,
                fmt=cache.format,
            )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        """Enqueue one step; all ranks of a replica run the same plan.

        A plan without rows runs the same code on zero-length tensors, since other replicas may wait in the collectives of
        the model; only when they agreed that nobody has work is there nothing to run.
        """
        timer = _Timer(self.device)
        self._take_rows(plan)
        if plan.agreement is not None and not plan.agreement.any_work:
            timer.stop()
            return PendingStep(plan, [], {}, {}, HostCopy([torch.empty(0, dtype=torch.int64)] * 2), [], timer)
        sampled_rows = [step.row for step in plan.decodes for _ in range(plan.query_len)]
        sampled_rows += [step.row for step in plan.prefills if step.sample]
        matchers = self._follow_grammars(sampled_rows)
        if self._probe is not None:
            self._probe.follow(plan)
        sequences = self._sequences_of(plan)
        key = self._graph_of(plan)
        if self._graphs is not None and key is not None:
            done = self._graphs.replay(key, sequences)
        else:
            done = self._run_eagerly(plan, sequences)
        tokens = done.tokens[: len(sampled_rows)]
        accepted = done.accepted[: len(plan.decodes)]
        scored = self._score_prompts(plan, done.hidden) + self._score_samples(plan, done.hidden, tokens, sampled_rows)
        errors = self._probe.errors() if self._probe is not None and self._leads else None
        timer.stop()
        pending = PendingStep(
            plan,
            sampled_rows,
            {step.row: step.prompt_logprobs for step in plan.prefills if step.prompt_logprobs is not None},
            {row: top for row in sampled_rows if (top := self._sampling.num_logprobs(row)) is not None},
            HostCopy(
                [tokens, accepted, *(t for _, part in scored for t in part.tensors())]
                + ([errors] if errors is not None else [])
            ),
            [(of_prompt, part.rows) for of_prompt, part in scored],
            timer,
            {sampled_rows[line]: m.error for line, m in matchers.items() if m.error is not None},
            compared=errors is not None,
        )
        self._unmatched += [(pending, line, matcher) for line, matcher in matchers.items() if matcher.error is None]
        return pending

    def capture_graphs(self, *, show_progress: bool, sizes: list[int] | None = None, fast_start: bool = False) -> float:
        """Capture the decode steps (engine/cuda_graph.py); returns the seconds it took. Every rank captures the same.

        sizes: numbers of sequences, ascending; None takes what covers all batches
        fast_start: few of them now, the others by `capture_next_graph`
        """
        padding = np.array([len(self._num_blocks), 0, 0, 0, 0, 0], dtype=np.int64)  # a row of its own, without slots
        self._graphs = GraphRunner(
            lambda sequences, query_len: self._step(sequences, query_len, depth=self._depth_behind(query_len)),
            padding,
            sizes=sizes or capture_sizes(len(self._num_blocks)),
            query_lens=(1,) if self._drafter is None else (1, 1 + self._drafter.depth),
            device=self.device,
            agree=self._all_ranks,
            fast_start=fast_start,
            probe=self._probe,
        )
        return self._graphs.capture(show_progress)

    @torch.inference_mode()
    def expert_load(self) -> HostCopy | None:
        """Rows that every expert of all ranks has computed since start, int64 [MoE layers, experts], on its way to the host;
        None without experts. All ranks call it between the same two steps."""
        here = self.model.expert_load()
        if here is None:
            return None
        return HostCopy([self.parallel.ep_all_gather(here.T.contiguous()).T.contiguous()])

    @property
    def num_graphs(self) -> int:
        """Shapes of decode steps that are captured."""
        return 0 if self._graphs is None else self._graphs.num_captured

    @property
    def graphs_complete(self) -> bool:
        """Whether `capture_next_graph` has nothing to do; the same on every rank."""
        return self._graphs is None or self._graphs.complete

    def capture_next_graph(self, num_sequences: int, query_len: int) -> None:
        """Add one graph after a fast start, best the one for steps of so many sequences; all ranks do between the same steps."""
        if self._graphs is not None and not self._graphs.complete:
            self._graphs.capture_next(num_sequences, query_len)

    def _all_ranks(self, could: bool) -> bool:
        return bool(self.parallel.ep_all_gather(torch.tensor([int(could)], device=self.device)).min())

    def _graph_of(self, plan: StepPlan) -> Key | None:
        """The graph that the step replays, chosen by what the replicas agreed on; None when it runs eagerly."""
        decode_only, sequences = not plan.prefills, len(plan.decodes)
        if plan.agreement is not None:
            decode_only, sequences = plan.agreement.decode_only, plan.agreement.sequences
        return self._graphs.key_of(sequences, plan.query_len) if self._graphs is not None and decode_only else None

    def _depth_behind(self, query_len: int) -> int:
        """Drafts that a graph makes: none where none are verified, so that a batch for which speculation is off only keeps the
        draft layer up to date."""
        return self._drafter.depth if self._drafter is not None and query_len > 1 else 0

    # ---- rows

    def _take_rows(self, plan: StepPlan) -> None:
        """Follow the plan's differences: freed rows, then new sequences, then new blocks on the host's table."""
        for row in plan.freed_rows:
            self._num_blocks[row] = 0
            self._sampling.free(row)
        for new in plan.new_sequences:
            self._num_blocks[new.row] = 0
            most = new.params.max_tokens
            # The last token of all is sampled but not computed.
            self._max_slots[new.row] = self._max_model_len if most is None else new.num_prompt_tokens + most - 1
        self._sampling.start(plan.new_sequences)
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for step in (*plan.decodes, *plan.prefills):
            if step.new_blocks:
                first, count = int(self._num_blocks[step.row]), len(step.new_blocks)
                self._num_blocks[step.row] = first + count
                rows += [step.row] * count
                columns += range(first, first + count)
                blocks += step.new_blocks
        if blocks:  # in most steps no sequence grows into another block
            where, values = (np.array(rows), np.array(columns)), np.array(blocks, dtype=np.int32)
            self._host_table[where] = values
            d_rows, d_columns, d_blocks = to_device([*where, values], self.device)
            self._block_table.index_put_((d_rows, d_columns), d_blocks)

    # ---- inputs

    def _sequences_of(self, plan: StepPlan) -> np.ndarray:
        """The decode sequences of a step, int64 [6, B] in the order of _Sequences."""
        steps = plan.decodes
        rows = np.array([s.row for s in steps], dtype=np.int64)
        columns = [
            rows,
            [s.num_computed for s in steps],
            [s.num_drafts for s in steps],
            [s.drafts_in_flight > 0 for s in steps],
            self._slots_of(rows),
            [s.token_ids[0] if s.token_ids else -1 for s in steps],
        ]
        return np.array(columns, dtype=np.int64)

    def _slots_of(self, rows: np.ndarray) -> np.ndarray:
        return np.minimum(self._num_blocks[rows] * BLOCK_SIZE, self._max_slots[rows])

    def _run_eagerly(self, plan: StepPlan, sequences: np.ndarray) -> _Done:
        """Make the step's call with whatever lengths the plan has. Everything travels in one copy."""
        rows = [*sequences[0], *(s.row for s in plan.prefills)]
        width = int(self._num_blocks[rows].max()) if rows else 1  # of the block tables
        pieces = plan_context(np.array([s.num_computed for s in plan.prefills], dtype=np.int64), self._context_tokens)
        arrays = [sequences] + (self._chunk_arrays(plan, pieces) if plan.prefills else [])
        moved = to_device(arrays, self.device)
        chunks = self._chunks(plan, pieces, moved[1:], width) if plan.prefills else None
        depth, ep_rows = plan.draft_depth, plan.num_lines
        if plan.agreement is not None:
            depth, ep_rows = plan.agreement.draft_depth, plan.agreement.rows
        return self._step(moved[0], plan.query_len, chunks, depth=depth, width=width, ep_rows=ep_rows)

    def _chunk_arrays(self, plan: StepPlan, pieces: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Host arrays of the prompt chunks, as `_chunks` takes them; pieces: of their contexts."""
        steps = plan.prefills
        lens = np.array([s.num_tokens for s in steps], dtype=np.int64)
        rows = np.array([s.row for s in steps], dtype=np.int64)
        starts = np.array([s.num_computed for s in steps], dtype=np.int64)
        ends = np.cumsum(lens)
        ids = np.concatenate([np.array(s.token_ids, dtype=np.int64) for s in steps])
        positions = np.arange(len(ids)) + np.repeat(starts - (ends - lens), lens)
        blocks = self._host_table[np.repeat(rows, lens), positions // BLOCK_SIZE].astype(np.int64)
        next_ids = np.zeros_like(ids)
        for end, length, step in zip(ends, lens, steps):
            next_ids[end - length : end - length + len(step.next_token_ids)] = step.next_token_ids
        sampled = np.array([s.sample for s in steps], dtype=bool)
        arrays = [ids, positions, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, next_ids]
        arrays += [(ends - 1)[sampled], rows[sampled], self._slots_of(rows[sampled]), rows, _cumulative(lens)]
        return arrays + [part for firsts, sizes in pieces for part in (firsts.astype(np.int32), _cumulative(sizes))]

    def _chunks(
        self, plan: StepPlan, pieces: list[tuple[np.ndarray, np.ndarray]], moved: list[torch.Tensor], width: int
    ) -> _Chunks:
        """`_chunk_arrays` on the device."""
        ids, positions, slots, next_ids, sampled, sampled_rows, num_slots, rows, cu_lens_q, *parts = moved
        lens = [step.num_tokens for step in plan.prefills]
        context = [
            ContextPiece(starts, cu_lens, int(sizes.sum()), int(sizes.max()), sizes.tolist())
            for starts, cu_lens, (_, sizes) in zip(parts[::2], parts[1::2], pieces)
        ]
        metadata = PrefillMetadata(self._tables(rows, width), cu_lens_q, max(lens), context, lens)
        return _Chunks(ids, positions, slots, next_ids, sampled, sampled_rows, num_slots, metadata)

    def _tables(self, rows: torch.Tensor, width: int | None) -> torch.Tensor:
        """int32 [n, width]: the first blocks of some rows' tables, None: all."""
        return self._block_table[:, :width].index_select(0, rows)

    # ---- the step

    def _step(
        self,
        sequences: torch.Tensor,
        query_len: int,
        chunks: _Chunks | None = None,
        *,
        depth: int,
        width: int | None = None,
        ep_rows: int | None = None,
    ) -> _Done:
        """All that a step does on the device. Without chunks it can be captured: nothing here waits for the device.

        sequences: int64 [6, B] in the order of _Sequences, query_len lines each; depth: drafts to make
        width: blocks of a row that are in use; ep_rows: lines that the ranks agreed on, None: this rank's
        """
        # Where every line stands, those of the decode sequences first.
        seqs = _Sequences(*sequences.unbind(0))
        count, num_lines = len(seqs.row), len(seqs.row) * query_len
        table, starts, drafts = self._tables(seqs.row, width), seqs.start, None
        if self._drafter is not None:
            starts = torch.addcmul(starts, seqs.in_flight, self._accepted.index_select(0, seqs.row))
        at = ops.decode_lines(starts, seqs.num_drafts, seqs.num_slots, table, query_len)
        ids = torch.where(seqs.token < 0, self._last_tokens.index_select(0, seqs.row), seqs.token)[:, None]
        if query_len > 1:
            assert self._drafter is not None, "the plan has drafts, this runner makes none"
            drafts = self._drafter.verified(seqs.row, at.num_drafts, query_len)
            ids = torch.cat((ids, drafts.tokens), dim=1)
        ids, positions, slots, live = (lines.flatten() for lines in (ids, at.positions, at.slots, at.live))
        rows, last_rows, num_slots = seqs.row.repeat_interleave(query_len), seqs.row, seqs.num_slots
        index = None  # of the lines that are sampled; None: all
        if chunks is not None:
            ids, positions = torch.cat((ids, chunks.ids)), torch.cat((positions, chunks.positions))
            slots, live = torch.cat((slots, chunks.slots)), torch.cat((live, torch.ones_like(chunks.slots, dtype=torch.bool)))
            rows, last_rows = torch.cat((rows, chunks.rows)), torch.cat((last_rows, chunks.rows))
            num_slots = torch.cat((num_slots, chunks.num_slots))
            index = torch.cat((torch.arange(num_lines, device=self.device), num_lines + chunks.sampled))
        attention = AttentionMetadata(
            num_decode_seqs=count,
            query_len=query_len,
            slots=slots,
            block_table=table,
            seq_lens=at.seq_lens,
            num_query=at.num_query if query_len > 1 else None,
            decode_plan=self._plan_decode(at.seq_lens, query_len) if count else None,
            prefill=chunks.metadata if chunks is not None else None,
        )
        batch = ForwardBatch(
            ids, positions, attention, self.cache.layers, row_mask=live, ep_rows=ep_rows or len(ids), probe=self._probe
        )
        hidden = self.model.forward(batch)

        # The next token of every sampled line; what lines behind a rejected draft choose is dropped.
        at_lines = positions if index is None else positions.index_select(0, index)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if len(rows):
            logits = self.model.logits(hidden if index is None else hidden.index_select(0, index))
            if self._leads:
                tokens = ops.choose_tokens(logits, at_lines + 1, rows, self._sampling.table, drafts)
            tokens = self.parallel.tp_broadcast(tokens)
        accepted, kept = ops.accept_tokens(tokens, rows, self._sampling.table, drafts), None
        last = torch.arange(len(tokens), device=self.device)  # line of each sequence's last token, among the sampled ones
        if drafts is not None:
            self._accepted.index_copy_(0, seqs.row, accepted)
            kept = ops.decode_lines(starts, accepted, seqs.num_slots, table, query_len)
            last = torch.cat((last[:num_lines:query_len] + accepted, last[num_lines:]))
        next_ids = tokens.clamp(min=0)
        self._last_tokens.index_copy_(0, last_rows, next_ids.index_select(0, last))

        if self._drafter is not None:
            if chunks is not None:
                of_chunks = chunks.next_ids.index_copy(0, chunks.sampled, next_ids[num_lines:])
                next_ids, table = torch.cat((next_ids[:num_lines], of_chunks)), self._tables(last_rows, width)
            lines = last if index is None else index.index_select(0, last)
            draft_rows = DraftRows(lines, last_rows, at_lines.index_select(0, last), num_slots, table)
            self._drafter.draft(batch, hidden, next_ids, kept, draft_rows, depth=depth)
        return _Done(hidden, tokens, accepted)

    def _plan_decode(self, seq_lens: torch.Tensor, query_len: int) -> DecodePlan:
        return ops.plan_decode(seq_lens, query_len=query_len, num_heads=self._local_heads, fmt=self.cache.format)

    # ---- outputs

    def _follow_grammars(self, rows: list[int]) -> dict[int, Matcher]:
        """Line -> matcher of the rows with a grammar. They have now seen every token before this step's, since such a row
        sits out the step behind one of its own, and its next tokens are masked."""
        if not self._sampling.any_grammar:
            return {}
        for pending, line, matcher in self._unmatched:
            if (token := pending.tokens()[line]) >= 0:
                matcher.accept([token])
        self._unmatched = []
        # A row with a grammar verifies no drafts, so only its first line counts.
        first_lines = {row: line for line, row in reversed(list(enumerate(rows)))}
        matchers = {row: m for row in first_lines if (m := self._sampling.matcher(row)) is not None}
        self._sampling.mask_grammars(matchers)
        return {first_lines[row]: matcher for row, matcher in matchers.items()}

    def _score_samples(
        self, plan: StepPlan, hidden: torch.Tensor, tokens: torch.Tensor, rows: list[int]
    ) -> list[tuple[bool, _Scored]]:
        """Log probabilities of the sampled tokens whose requests want them, from logits of their own."""
        wanted = [line for line, row in enumerate(rows) if self._sampling.num_logprobs(row) is not None]
        if not wanted:
            return []
        num_lines = len(plan.decodes) * plan.query_len
        ends = num_lines + np.cumsum([step.num_tokens for step in plan.prefills])
        sampled = [int(end) - 1 for end, step in zip(ends, plan.prefills) if step.sample]
        lines = [*range(num_lines), *sampled]
        picked, of_hidden = to_device([np.array(wanted), np.array([lines[line] for line in wanted])], self.device)
        scored_rows = [rows[line] for line in wanted]
        num_top = max(self._sampling.num_logprobs(row) or 0 for row in scored_rows)
        return self._scores(hidden.index_select(0, of_hidden), tokens.index_select(0, picked), scored_rows, num_top, False)

    def _scores(
        self, hidden: torch.Tensor, tokens: torch.Tensor, rows: list[int], num_top: int, of_prompt: bool
    ) -> list[tuple[bool, _Scored]]:
        """Log probabilities of one token behind each hidden state, a bounded number of rows at a time; the leader's alone."""
        scored: list[tuple[bool, _Scored]] = []
        at_once = max(1, _SCORED_BYTES // (4 * self._vocab_size))
        for at in range(0, len(rows), at_once):
            logits = self.model.logits(hidden[at : at + at_once])
            if self._leads:
                part = tokens[at : at + at_once]
                scored.append((of_prompt, _Scored(rows[at : at + at_once], part, score(logits, part, num_top))))
        return scored

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> list[tuple[bool, _Scored]]:
        """Log probabilities of the prompt tokens that follow each token of a chunk."""
        scored: list[tuple[bool, _Scored]] = []
        start = len(plan.decodes) * plan.query_len
        for step in plan.prefills:
            if step.prompt_logprobs is not None and (count := len(step.next_token_ids)):
                (following,) = to_device([np.array(step.next_token_ids, dtype=np.int64)], self.device)
                scored += self._scores(hidden[start : start + count], following, [step.row] * count, step.prompt_logprobs, True)
            start += step.num_tokens
        return scored


def _cumulative(lens: np.ndarray) -> np.ndarray:
    """int32 [P + 1] cumulative sums of lens [P], from 0."""
    sums = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=sums[1:])
    return sums


def plan_context(lens: np.ndarray, most: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut the cached contexts of the prefill chunks, lens int64 [P] tokens, into pieces of at most `most` tokens in all.

    Returns (starts [P], lens [P]) per piece. Contexts are taken in order, and cut at block borders only.
    """
    pieces = []
    done = np.zeros_like(lens)
    while (done < lens).any():
        room, take = most, np.zeros_like(lens)
        for i in np.flatnonzero(done < lens):
            left = int(lens[i] - done[i])
            take[i] = left if left <= room else room // BLOCK_SIZE * BLOCK_SIZE
            room -= int(take[i])
            if room < BLOCK_SIZE:
                break
        pieces.append((done.copy(), take))
        done = done + take
    return pieces
