"""Executes step plans on one rank: plan -> ForwardBatch -> logits -> tokens.

Owns the device tables of the rows: block tables and last tokens, a pure function of the plans received. Sampled tokens
stay on the device for the next step, so a plan may follow before the host has seen the last result. `run` only enqueues
work; `PendingStep.wait` brings the result. Does not schedule, and knows no other replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.cuda_graph import GraphRunner, capture_sizes
from engine.fidelity import FidelityProbe
from engine.kv_cache import KVCache
from engine.messages import TokenLogprob
from engine.plan import RowResult, StepPlan, StepResult
from engine.sampler import TokenScores, sample, score
from engine.sampling_state import Matcher, SamplingState
from engine.speculative import DecodeLines, Drafter, DraftRows, Ratio, count_accepted
from engine.staging import HostCopy, to_device
from kernels import ops
from kernels.layout import BLOCK_SIZE
from models.batch import AttentionMetadata, ContextPiece, ForwardBatch, PrefillMetadata
from models.causal_lm import CausalLM
from models.config import ModelConfig
from models.parallel import ParallelContext

CONTEXT_TOKENS = 8192  # cached tokens expanded at once before a prefill chunk; bounds the workspace of long contexts
_SCORED_BYTES = 64 << 20  # logits of prompt tokens held at once

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
    speculates: bool = False  # whether the copies hold the accepted drafts of each decode sequence, after the tokens
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
        if self.speculates:
            for step, accepted in zip(self.plan.decodes, next(copied).tolist()):
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


@dataclass(frozen=True)
class _Inputs:
    """Device inputs of a step, made by `ModelRunner._fill` alone.

    sample_index, sample_rows, sample_positions: int64 [n]  line of the hidden states, row, and position of the new token;
        all lines of the decode sequences first, then one of each prefill that is sampled
    drafts: int64 [B, S - 1] the drafts under verification, num_drafts int64 [B]; both None when there are none
    next_ids: int64 [T] the known token after each prefill line (draft layer), 0 where it is sampled; None without drafting
    draft_rows: one entry a sampled sequence, `lines` being each sequence's first line; None without drafting
    """

    batch: ForwardBatch
    sample_index: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    drafts: torch.Tensor | None
    num_drafts: torch.Tensor | None
    next_ids: torch.Tensor | None
    draft_rows: DraftRows | None


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
        self._block_table = torch.full((max_num_seqs, max_blocks), cache.null_block, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # drafts, in the row's last verification
        self._leads = parallel.tp_rank == 0
        self._sampling = SamplingState(self._vocab_size, device, matcher)
        self._unmatched: list[tuple[PendingStep, int, Matcher]] = []  # (step, line, matcher) of tokens no grammar has seen
        self._graphs: GraphRunner | None = None
        self._probe = probe
        self._drafter: Drafter | None = None
        if num_speculative_tokens:
            self._drafter = Drafter(
                model,
                depth=num_speculative_tokens,
                max_num_seqs=max_num_seqs,
                vocab_size=self._vocab_size,
                ratio=ratio_acceptance,
                num_heads=self._local_heads,
                fmt=cache.format,
                device=device,
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
            return PendingStep(plan, [], {}, {}, HostCopy([torch.empty(0, dtype=torch.int64)]), [], timer)
        inputs = self._fill(plan)
        hidden = self._forward(plan, inputs.batch)
        sampled_rows = [step.row for step in plan.decodes for _ in range(plan.query_len)]
        sampled_rows += [step.row for step in plan.prefills if step.sample]
        scored = self._score_prompts(plan, hidden)
        tokens = torch.empty(len(sampled_rows), dtype=torch.int64, device=self.device)
        matchers: dict[int, Matcher] = {}
        accepted: torch.Tensor | None = None
        if sampled_rows:
            logits = self.model.logits(hidden.index_select(0, inputs.sample_index))
            if self._leads:
                matchers = self._matchers(sampled_rows)
                tokens = self._sample(logits, inputs, sampled_rows, scored)
            tokens = self.parallel.tp_broadcast(tokens)
            accepted = self._keep_tokens(plan, inputs, tokens)
        if self._drafter is not None:
            self._draft(plan, inputs, hidden, tokens, accepted)
        errors = self._probe.errors() if self._probe is not None and self._leads else None
        timer.stop()
        pending = PendingStep(
            plan,
            sampled_rows,
            {step.row: step.prompt_logprobs for step in plan.prefills if step.prompt_logprobs is not None},
            {row: top for row in sampled_rows if (top := self._sampling.num_logprobs(row)) is not None} if self._leads else {},
            HostCopy(
                [tokens, *([accepted] if accepted is not None else []), *(t for _, part in scored for t in part.tensors())]
                + ([errors] if errors is not None else [])
            ),
            [(of_prompt, part.rows) for of_prompt, part in scored],
            timer,
            {sampled_rows[line]: m.error for line, m in matchers.items() if m.error is not None},
            speculates=accepted is not None,
            compared=errors is not None,
        )
        self._unmatched += [(pending, line, matcher) for line, matcher in matchers.items() if matcher.error is None]
        return pending

    def _forward(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
        if self._graphs is None:
            return self.model.forward(batch)
        return self._graphs.forward(batch, self._sequences_to_replay(plan))

    def capture_graphs(self, *, show_progress: bool, sizes: list[int] | None = None, fast_start: bool = False) -> float:
        """Capture the decode steps (engine/cuda_graph.py); returns the seconds it took. Every rank captures the same.

        sizes: numbers of sequences, ascending; None takes what covers all batches
        fast_start: few of them now, the others by `capture_next_graph`
        """
        self._graphs = GraphRunner(
            self.model.forward,
            self.cache.layers,
            sizes=sizes or capture_sizes(len(self._num_blocks)),
            query_lens=(1,) if self._drafter is None else (1, 1 + self._drafter.depth),
            max_blocks=self._block_table.shape[1],
            null_block=self.cache.null_block,
            num_heads=self._local_heads,
            fmt=self.cache.format,
            device=self.device,
            agree=self._all_ranks,
            fast_start=fast_start,
            drafter=self._drafter,
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

    def _keep_tokens(self, plan: StepPlan, inputs: _Inputs, tokens: torch.Tensor) -> torch.Tensor | None:
        """Store each sequence's last token. Returns the accepted drafts of each decode sequence, None without drafts."""
        if inputs.drafts is None or inputs.num_drafts is None:
            self._last_tokens.index_copy_(0, inputs.sample_rows, tokens.clamp(min=0))
            return None
        num_lines, query_len = len(plan.decodes) * plan.query_len, plan.query_len
        targets = tokens[:num_lines].view(-1, query_len)
        accepted = count_accepted(targets, inputs.drafts, inputs.num_drafts)
        last = torch.cat((targets.gather(1, accepted[:, None])[:, 0], tokens[num_lines:]))
        rows = torch.cat((inputs.sample_rows[:num_lines:query_len], inputs.sample_rows[num_lines:]))
        self._last_tokens.index_copy_(0, rows, last.clamp(min=0))
        self._accepted.index_copy_(0, rows[: len(accepted)], accepted)
        return accepted

    def _draft(
        self, plan: StepPlan, inputs: _Inputs, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor | None
    ) -> None:
        """Bring the draft layer up to date with the step and draft for the next one."""
        assert self._drafter is not None and inputs.next_ids is not None and inputs.draft_rows is not None
        inputs.next_ids.index_copy_(0, inputs.sample_index, tokens.clamp(min=0))
        rows = inputs.draft_rows
        depth = plan.agreement.draft_depth if plan.agreement is not None else plan.draft_depth
        sequences = self._sequences_to_replay(plan)
        graphs = self._graphs if sequences is not None else None
        if (
            graphs is not None
            and depth == graphs.draft_depth(plan.query_len)
            and graphs.draft(sequences or 0, plan.query_len, inputs.next_ids, accepted, rows)
        ):
            return
        if accepted is not None:
            count = len(plan.decodes)
            behind = torch.nn.functional.pad(accepted, (0, len(rows.rows) - count))
            rows = replace(rows, lines=rows.lines + behind, positions=rows.positions + behind)
        self._drafter.draft(inputs.batch, hidden, inputs.next_ids, accepted, rows, depth=depth)

    def _sequences_to_replay(self, plan: StepPlan) -> int | None:
        """Sequences that a graph of this step must hold, the most of any replica; None when any replica has prefill."""
        if plan.agreement is None:
            return None if plan.prefills else len(plan.decodes)
        return plan.agreement.sequences if plan.agreement.decode_only else None

    # ---- rows

    def _take_rows(self, plan: StepPlan) -> None:
        """Follow the plan's differences: freed rows, then new sequences, then new blocks on the host's table."""
        for row in plan.freed_rows:
            self._num_blocks[row] = 0
            if self._leads:
                self._sampling.free(row)
        for new in plan.new_sequences:
            self._num_blocks[new.row] = 0
            most = new.params.max_tokens
            # The last token of all is sampled but not computed.
            self._max_slots[new.row] = self._max_model_len if most is None else new.num_prompt_tokens + most - 1
            if self._leads:
                self._sampling.start(new)
        if self._drafter is not None:
            self._drafter.start(plan.new_sequences)
        for step in (*plan.decodes, *plan.prefills):
            if step.new_blocks:
                first, count = int(self._num_blocks[step.row]), len(step.new_blocks)
                self._host_table[step.row, first : first + count] = step.new_blocks
                self._num_blocks[step.row] = first + count

    # ---- inputs

    def _fill(self, plan: StepPlan) -> _Inputs:
        """Write the device inputs of a step: everything travels in one copy."""
        decodes, prefills, query_len = plan.decodes, plan.prefills, plan.query_len
        num_decodes, num_lines = len(decodes), len(decodes) * plan.query_len
        ids, positions, token_rows, live = _tokens_of(plan)
        slots = self._host_table[token_rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        slots[~live] = -1
        decode_rows = token_rows[:num_lines:query_len]
        num_drafts = np.array([step.num_drafts for step in decodes], dtype=np.int64)
        seq_lens = (positions[:num_lines:query_len] + 1 + num_drafts).astype(np.int32)
        chunk_lens = np.array([step.num_tokens for step in prefills], dtype=np.int64)
        chunk_ends = num_lines + np.cumsum(chunk_lens)
        sampled = np.array([step.sample for step in prefills], dtype=bool)
        last_lines = np.concatenate((np.arange(num_lines), (chunk_ends - 1)[sampled]))
        contexts = np.array([step.num_computed for step in prefills], dtype=np.int64)
        pieces = plan_context(contexts, self._context_tokens)
        prefill_rows = np.array([step.row for step in prefills], dtype=np.int64)
        first_lines = np.concatenate((np.arange(0, num_lines, query_len), (chunk_ends - 1)[sampled]))  # of each sequence
        draft_rows = token_rows[first_lines]
        ahead = np.array([step.drafts_in_flight > 0 for step in decodes], dtype=np.int64)

        arrays = [
            ids, positions, slots,
            decode_rows, seq_lens, num_drafts,
            prefill_rows, _cumulative(chunk_lens),
            last_lines, token_rows[last_lines], positions[last_lines] + 1,
            *_new_blocks_of(plan, self._num_blocks),
            *(part for starts, lens in pieces for part in (starts.astype(np.int32), _cumulative(lens))),
        ]  # fmt: skip
        num_pieces = 2 * len(pieces)
        if query_len > 1:
            arrays += [live, (num_drafts + 1).astype(np.int32)]
        if self._drafter is not None:
            num_slots = np.minimum(self._num_blocks[draft_rows] * BLOCK_SIZE, self._max_slots[draft_rows])
            arrays += [_next_ids_of(plan), first_lines, draft_rows, positions[first_lines], num_slots, ahead]
        moved = to_device(arrays, self.device)
        d_ids, d_positions, d_slots, d_decode_rows, d_seq_lens, d_num_drafts, d_prefill_rows, cu_lens_q = moved[:8]
        sample_index, sample_rows, sample_positions, table_rows, table_columns, table_blocks = moved[8:14]
        context_parts, rest = moved[14 : 14 + num_pieces], moved[14 + num_pieces :]
        row_mask, num_query = (rest.pop(0), rest.pop(0)) if query_len > 1 else (None, None)

        if table_rows.numel():  # in most steps no sequence grows into another block
            self._block_table.index_put_((table_rows, table_columns), table_blocks)
        decode_table = self._table_of(d_decode_rows, decode_rows)
        next_ids = rows = d_ahead = None
        if self._drafter is not None:
            next_ids, d_lines, d_rows, d_starts, d_num_slots, d_ahead = rest
            if ahead.any():
                # Of these sequences the plan knows a lower bound, the device how many drafts came on top.
                d_ahead = d_ahead * self._accepted.index_select(0, d_decode_rows)
                d_starts = torch.cat((d_starts[:num_decodes] + d_ahead, d_starts[num_decodes:]))
                at = DecodeLines.at(d_starts[:num_decodes], d_num_drafts, d_num_slots[:num_decodes], decode_table, query_len)
                d_seq_lens, d_num_drafts = at.seq_lens, at.num_drafts
                d_positions = _with_front(d_positions, at.positions)
                d_slots = _with_front(d_slots, at.slots)
                sample_positions = _with_front(sample_positions, at.positions + 1)
                if row_mask is not None:
                    row_mask = _with_front(row_mask, at.live)
                    num_query = (d_num_drafts + 1).to(torch.int32)
            rows = DraftRows(d_lines, d_rows, d_starts, d_num_slots, self._table_of(d_rows, draft_rows))
        # A negative id stands for the token this rank sampled last for the row; only decode rows have one.
        lines = d_ids[:num_lines].view(num_decodes, query_len)
        known = lines[:, 0]
        known.copy_(torch.where(known < 0, self._last_tokens.index_select(0, d_decode_rows), known))
        drafts = None
        if query_len > 1:
            assert self._drafter is not None, "the plan has drafts, this runner makes none"
            drafts = self._drafter.tokens.index_select(0, d_decode_rows)[:, : query_len - 1]
            lines[:, 1:] = drafts

        prefill = None
        if prefills:
            context = [
                ContextPiece(starts, cu_lens, int(lens.sum()), int(lens.max()), lens.tolist())
                for starts, cu_lens, (_, lens) in zip(context_parts[::2], context_parts[1::2], pieces)
            ]
            table = self._table_of(d_prefill_rows, prefill_rows)
            prefill = PrefillMetadata(table, cu_lens_q, int(chunk_lens.max()), context, chunk_lens.tolist())
        decode_plan = None
        if decodes:
            decode_plan = ops.plan_decode(d_seq_lens, query_len=query_len, num_heads=self._local_heads, fmt=self.cache.format)
        attention = AttentionMetadata(
            num_decode_seqs=num_decodes,
            query_len=query_len,
            slots=d_slots,
            block_table=decode_table,
            seq_lens=d_seq_lens,
            num_query=num_query,
            decode_plan=decode_plan,
            prefill=prefill,
        )
        ep_rows = plan.agreement.rows if plan.agreement is not None else len(ids)
        if self._probe is not None:
            self._probe.follow(plan)
        batch = ForwardBatch(
            d_ids, d_positions, attention, self.cache.layers, row_mask=row_mask, ep_rows=ep_rows, probe=self._probe
        )
        return _Inputs(
            batch, sample_index, sample_rows, sample_positions, drafts, d_num_drafts if query_len > 1 else None, next_ids, rows
        )

    def _table_of(self, device_rows: torch.Tensor, host_rows: np.ndarray) -> torch.Tensor:
        """int32 [rows, widest]: block tables of some rows, cut to the longest of them."""
        widest = int(self._num_blocks[host_rows].max()) if len(host_rows) else 1
        return self._block_table[:, :widest].index_select(0, device_rows)

    # ---- outputs

    def _matchers(self, rows: list[int]) -> dict[int, Matcher]:
        """Line -> matcher of the rows with a grammar, which have now seen every token before this step's.

        The forward pass is already enqueued, so waiting for an earlier step's tokens leaves no gap on the device.
        """
        if not self._sampling.any_grammar:
            return {}
        for pending, line, matcher in self._unmatched:
            if (token := pending.tokens()[line]) >= 0:
                matcher.accept([token])
        self._unmatched = []
        # A row with a grammar verifies no drafts, so only its first line counts.
        first_lines = {row: line for line, row in reversed(list(enumerate(rows)))}
        return {line: m for row, line in first_lines.items() if (m := self._sampling.matcher(row)) is not None}

    def _sample(
        self, logits: torch.Tensor, inputs: _Inputs, rows: list[int], scored: list[tuple[bool, _Scored]]
    ) -> torch.Tensor:
        """Sample `rows`, one line of FP32 logits [n, vocab] each; log probabilities are added to `scored`."""
        batch = self._sampling.with_grammars(self._sampling.batch(rows), rows)
        ratio = None
        if self._drafter is not None and inputs.drafts is not None and inputs.num_drafts is not None:
            ratio = self._drafter.ratio(inputs.drafts, inputs.num_drafts, inputs.sample_rows)
        if inputs.drafts is not None and batch.penalties is not None:
            tokens = self._sample_in_order(logits, inputs, rows, ratio)
        else:
            drawer = ratio.draw if ratio is not None else None
            tokens = sample(logits, inputs.sample_positions, batch, self._sampling.counts, drawer=drawer)
        if batch.logprob_rows is not None:
            lines = batch.logprob_rows
            wanted = [row for row in rows if self._sampling.num_logprobs(row) is not None]
            chosen = tokens.index_select(0, lines)
            scores = score(logits.index_select(0, lines), chosen, batch.num_logprobs)
            scored.append((False, _Scored(wanted, chosen, scores)))
        return tokens

    def _sample_in_order(self, logits: torch.Tensor, inputs: _Inputs, rows: list[int], ratio: Ratio | None) -> torch.Tensor:
        """Sample the lines of decode sequences one after the other, since penalties count the tokens before.

        A sequence's tokens count up to its first rejected draft; what is drawn behind it is dropped anyway.
        """
        drafts, num_drafts = inputs.drafts, inputs.num_drafts
        assert drafts is not None and num_drafts is not None
        num_sequences, query_len = len(drafts), drafts.shape[1] + 1
        num_lines = num_sequences * query_len
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        firsts = torch.arange(0, num_lines, query_len, device=self.device)
        live: torch.Tensor | None = None
        for index in range(query_len):
            lines, part = firsts + index, rows[:num_lines:query_len]
            if not index:
                lines = torch.cat((lines, torch.arange(num_lines, len(rows), device=self.device)))
                part = part + rows[num_lines:]
            batch = self._sampling.with_grammars(self._sampling.batch(part), part)
            drawn = sample(
                logits.index_select(0, lines),
                inputs.sample_positions.index_select(0, lines),
                batch,
                self._sampling.counts,
                live,
                ratio.lines(lines).draw if ratio is not None else None,
            )
            tokens.index_copy_(0, lines, drawn)
            if index < query_len - 1:
                accepts = (drawn[:num_sequences] == drafts[:, index]) & (index < num_drafts)
                live = accepts if live is None else live & accepts
        return tokens

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> list[tuple[bool, _Scored]]:
        """Log probabilities of the prompt tokens that follow each token of a chunk, a bounded number of rows at a time."""
        scored: list[tuple[bool, _Scored]] = []
        start = len(plan.decodes) * plan.query_len
        lines_at_once = max(1, _SCORED_BYTES // (4 * self._vocab_size))
        for step in plan.prefills:
            if step.prompt_logprobs is not None and step.next_token_ids:
                (following,) = to_device([np.array(step.next_token_ids, dtype=np.int64)], self.device)
                for at in range(0, len(step.next_token_ids), lines_at_once):
                    tokens = following[at : at + lines_at_once]
                    logits = self.model.logits(hidden[start + at : start + at + len(tokens)])
                    if self._leads:
                        scores = score(logits, tokens, step.prompt_logprobs)
                        scored.append((True, _Scored([step.row] * len(tokens), tokens, scores)))
            start += step.num_tokens
        return scored


def _with_front(values: torch.Tensor, front: torch.Tensor) -> torch.Tensor:
    """`values` [T] with its first elements replaced by those of `front`."""
    return front.flatten() if front.numel() == len(values) else torch.cat((front.flatten(), values[front.numel() :]))


def _tokens_of(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(token ids, positions, rows: int64 [T]; live: bool [T]) of every line, decode sequences first.

    The id is -1 where the rank knows the token. Padding behind a sequence's drafts is not live, and stays at its last
    live position, so that no position lies outside the tables.
    """
    decodes, prefills, query_len = plan.decodes, plan.prefills, plan.query_len
    count = len(decodes)
    first_ids = np.fromiter((s.token_ids[0] if s.token_ids else -1 for s in decodes), np.int64, count)
    starts = np.fromiter((s.num_computed for s in decodes), np.int64, count)
    rows = np.fromiter((s.row for s in decodes), np.int64, count)
    live = np.ones(count, dtype=bool)
    parts = [first_ids, starts, rows]
    if query_len > 1:
        num_drafts = np.fromiter((s.num_drafts for s in decodes), np.int64, count)[:, None]
        offsets = np.arange(query_len)
        ids = np.where(offsets > 0, 0, first_ids[:, None])
        parts = [ids.ravel(), (starts[:, None] + np.minimum(offsets, num_drafts)).ravel(), rows.repeat(query_len)]
        live = (offsets <= num_drafts).ravel()
    if prefills:
        chunks = [
            [np.array(s.token_ids, dtype=np.int64) for s in prefills],
            [np.arange(s.num_computed, s.num_computed + s.num_tokens) for s in prefills],
            [np.full(s.num_tokens, s.row, dtype=np.int64) for s in prefills],
        ]
        parts = [np.concatenate((part, *chunk)) for part, chunk in zip(parts, chunks)]
        live = np.concatenate((live, np.ones(len(parts[0]) - len(live), dtype=bool)))
    return parts[0], parts[1], parts[2], live


def _next_ids_of(plan: StepPlan) -> np.ndarray:
    """int64 [T] the token after each prefill line as the plan tells it; 0 on decode lines and where it is sampled."""
    ids = np.zeros(plan.num_lines, dtype=np.int64)
    start = len(plan.decodes) * plan.query_len
    for step in plan.prefills:
        ids[start : start + len(step.next_token_ids)] = step.next_token_ids
        start += step.num_tokens
    return ids


def _new_blocks_of(plan: StepPlan, num_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row int64, column int64, block int32) of every block the plan adds; num_blocks counts them already."""
    rows: list[int] = []
    columns: list[int] = []
    blocks: list[int] = []
    for step in (*plan.decodes, *plan.prefills):
        if count := len(step.new_blocks):
            rows += [step.row] * count
            columns += range(int(num_blocks[step.row]) - count, int(num_blocks[step.row]))
            blocks += step.new_blocks
    return np.array(rows, np.int64), np.array(columns, np.int64), np.array(blocks, np.int32)


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
