"""What each row needs from the sampler, kept between steps: parameters, token counts, allowed-token masks, grammars.

Turns "these rows are sampled now" into the tensors of engine/sampler.py. Only the leader of a replica keeps one. Does not
know the step plan; a row is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from engine.plan import NewSequence
from engine.sampler import GREEDY, Entries, Penalties, SamplingBatch, TokenCounts
from engine.staging import to_device
from kernels.layout import Draws, Filters


class Matcher(Protocol):
    """Where one sequence stands in its grammar (engine/grammar.py)."""

    @property
    def error(self) -> str | None:
        """Why no token can follow, None while one can."""

    def accept(self, token_ids: list[int]) -> bool:
        """Advance by sampled tokens."""

    def mask(self) -> np.ndarray:
        """Tokens allowed next, int32 [ceil(vocab / 32)]: bit t % 32 of word t // 32."""


@dataclass
class _Row:
    new: NewSequence
    count_slot: int | None = None
    mask: np.ndarray | None = None  # packed allowed_token_ids
    matcher: Matcher | None = None


def is_greedy(row: NewSequence) -> bool:
    """top_k 1 is greedy too: of equal best tokens the first is taken, as at temperature 0."""
    return row.params.greedy or row.params.top_k == 1


class SamplingState:
    """Sampling state of the rows of one replica.

    matcher: makes the Matcher of a grammar; None where requests with a grammar are refused before they get here
    """

    def __init__(self, vocab_size: int, device: torch.device, matcher: Callable[[str], Matcher] | None = None) -> None:
        self.counts: TokenCounts | None = None  # tables grow with the rows that need them
        self._vocab_size = vocab_size
        self._device = device
        self._matcher = matcher
        self._rows: dict[int, _Row] = {}
        self._free_slots: list[int] = []
        self._built_for: tuple[int, ...] | None = None
        self._built = GREEDY

    # ---- rows

    def start(self, new: NewSequence) -> None:
        """A sequence takes a row; `new.known_token_ids` is its history if it has penalties or a grammar."""
        state = _Row(new)
        params = new.params
        if params.needs_token_counts:
            state.count_slot = self._take_slot()
            self._set_counts(state.count_slot, new.known_token_ids, new.num_prompt_tokens)
        if params.allowed_token_ids is not None:
            state.mask = pack_mask(params.allowed_token_ids, self._vocab_size)
        if params.grammar is not None:
            assert self._matcher is not None, "a request with a grammar reached a runner without grammars"
            state.matcher = self._matcher(params.grammar)
            state.matcher.accept(new.known_token_ids[new.num_prompt_tokens :])
        self._rows[new.row] = state
        self._built_for = None

    def free(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is not None and state.count_slot is not None:
            self._free_slots.append(state.count_slot)
        self._built_for = None

    def num_logprobs(self, row: int) -> int | None:
        return self._rows[row].new.params.logprobs

    def matcher(self, row: int) -> Matcher | None:
        return self._rows[row].matcher

    @property
    def any_grammar(self) -> bool:
        return any(state.matcher is not None for state in self._rows.values())

    # ---- batches

    def batch(self, rows: Sequence[int]) -> SamplingBatch:
        """Tensors for sampling `rows`, one line of logits each. Kept while the same rows are sampled; masks of grammars
        are new each step, so they are added by `with_grammars`."""
        key = tuple(rows)
        if key != self._built_for:
            self._built, self._built_for = self._build(key), key
        return self._built

    def with_grammars(self, batch: SamplingBatch, rows: Sequence[int]) -> SamplingBatch:
        """`batch` with the masks of grammars at their present state, each within the row's allowed_token_ids."""
        if not self.any_grammar:
            return batch
        lines = [i for i, row in enumerate(rows) if self._rows[row].matcher is not None]
        if not lines:
            return batch
        lines += [i for i, row in enumerate(rows) if self._rows[row].matcher is None and self._rows[row].mask is not None]
        masks = np.zeros((len(lines), _words(self._vocab_size)), dtype=np.int32)
        for mask, line in zip(masks, lines):
            state = self._rows[rows[line]]
            if state.matcher is None or state.matcher.error is None:  # else nothing is allowed and the row fails
                mask[:] = -1 if state.matcher is None else state.matcher.mask()
            if state.mask is not None:
                mask &= state.mask
        mask_rows, packed = to_device([np.array(lines, dtype=np.int64), masks], self._device)
        return replace(batch, mask_rows=mask_rows, masks=packed)

    def _build(self, rows: tuple[int, ...]) -> SamplingBatch:
        lists = _Lists()
        for line, row in enumerate(rows):
            lists.add(line, self._rows[row], self._vocab_size)
        arrays = lists.arrays()
        if not arrays:
            return GREEDY
        sizes = [len(columns) for columns in arrays.values()]
        moved = iter(to_device([column for columns in arrays.values() for column in columns], self._device))
        tensors: dict[str, list[Any]] = {name: [next(moved) for _ in range(size)] for name, size in zip(arrays, sizes)}
        draws = None
        if "draws" in tensors:
            filters = None
            if "filters" in tensors:
                lines, min_p, top_k, top_p = tensors["filters"]
                filters = Filters(lines, min_p, top_k, top_p, lists.max_top_k, lists.open_top_p)
            lines, temperature, seeds = tensors["draws"]
            draws = Draws(lines, temperature, seeds, filters)
        mask_rows, masks = tensors.get("masks", (None, None))
        return SamplingBatch(
            draws=draws,
            penalties=Penalties(*tensors["penalties"]) if "penalties" in tensors else None,
            bias=Entries(*tensors["bias"]) if "bias" in tensors else None,
            late_stops=Entries(*tensors["late_stops"]) if "late_stops" in tensors else None,
            mask_rows=mask_rows,
            masks=masks,
            logprob_rows=tensors["logprobs"][0] if "logprobs" in tensors else None,
            num_logprobs=lists.num_logprobs,
        )

    # ---- token counts

    def _take_slot(self) -> int:
        if not self._free_slots:
            old = self.counts
            size = 0 if old is None else old.in_prompt.shape[0]
            grown = max(4, 2 * size)
            in_prompt = torch.zeros(grown, self._vocab_size, dtype=torch.bool, device=self._device)
            in_output = torch.zeros(grown, self._vocab_size, dtype=torch.int32, device=self._device)
            if old is not None:
                in_prompt[:size] = old.in_prompt
                in_output[:size] = old.in_output
            self.counts = TokenCounts(in_prompt, in_output)
            self._free_slots = list(range(grown - 1, size - 1, -1))
        return self._free_slots.pop()

    def _set_counts(self, slot: int, known: list[int], num_prompt: int) -> None:
        assert self.counts is not None
        prompt, output = to_device(
            [np.array(known[:num_prompt], np.int64), np.array(known[num_prompt:], np.int64)], self._device
        )
        self.counts.in_prompt[slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(output, dtype=torch.int32)
        self.counts.in_output[slot].zero_().index_add_(0, output, ones)


_DTYPES = {  # columns of each part of a SamplingBatch
    "draws": (np.int64, np.float32, np.int64),
    "filters": (np.int64, np.float32, np.int64, np.float64),
    "penalties": (np.int64, np.int64, np.float32, np.float32, np.float32),
    "bias": (np.int64, np.int64, np.float32),
    "late_stops": (np.int64, np.int64, np.int64),
    "logprobs": (np.int64,),
}


@dataclass
class _Lists:
    """Columns of the parts of a SamplingBatch while rows are added; the column order is that of the dataclasses."""

    draws: list[tuple[int, float, int]] = field(default_factory=list)
    filters: list[tuple[int, float, int, float]] = field(default_factory=list)
    penalties: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    bias: list[tuple[int, int, float]] = field(default_factory=list)
    late_stops: list[tuple[int, int, int]] = field(default_factory=list)
    logprobs: list[tuple[int]] = field(default_factory=list)
    mask_lines: list[int] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    max_top_k: int = 0
    open_top_p: bool = False
    num_logprobs: int = 0

    def add(self, line: int, state: _Row, vocab_size: int) -> None:
        params = state.new.params
        if not is_greedy(state.new):
            assert params.seed is not None, "the leader draws a seed where the user gave none"
            self._add_filters(len(self.draws), state, vocab_size)
            self.draws.append((line, params.temperature, params.seed))
        if state.count_slot is not None:
            factors = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            self.penalties.append((line, state.count_slot, *factors))
        self.bias += [(line, token, value) for token, value in params.logit_bias.items()]
        if params.min_tokens > state.new.num_output_tokens:
            until = state.new.num_prompt_tokens + params.min_tokens
            self.late_stops += [(line, t, until) for t in {*params.stop_token_ids, *state.new.eos_token_ids} if t < vocab_size]
        if state.mask is not None:
            self.mask_lines.append(line)
            self.masks.append(state.mask)
        if params.logprobs is not None:
            self.logprobs.append((line,))
            self.num_logprobs = max(self.num_logprobs, params.logprobs)

    def _add_filters(self, draw: int, state: _Row, vocab_size: int) -> None:
        params = state.new.params
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        top_p = params.top_p if params.top_p < 1.0 else np.inf
        if params.min_p == 0.0 and top_k == vocab_size and top_p == np.inf:
            return
        self.filters.append((draw, params.min_p, top_k, top_p))
        if top_k < vocab_size:
            self.max_top_k = max(self.max_top_k, top_k)
        elif top_p < np.inf:
            self.open_top_p = True

    def arrays(self) -> dict[str, list[np.ndarray]]:
        found: dict[str, list[np.ndarray]] = {}
        for name, dtypes in _DTYPES.items():
            if entries := getattr(self, name):
                found[name] = [np.array(column, dtype) for column, dtype in zip(zip(*entries), dtypes)]
        if self.masks:
            found["masks"] = [np.array(self.mask_lines, np.int64), np.stack(self.masks)]
        return found


def _words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def pack_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32 [ceil(vocab / 32)] with the bits of `token_ids` set."""
    bits = np.zeros(_words(vocab_size) * 32, dtype=np.uint8)
    bits[np.asarray(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
