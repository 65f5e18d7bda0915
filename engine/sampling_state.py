"""What each row asks of the sampler, kept on the device between steps; grammars and log probabilities, on the host.

A row's parameters are written once, when a sequence takes it, so that a step needs no word about sampling; only the masks of
grammars change from token to token. Does not know the step plan; a row is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.plan import NewSequence
from engine.staging import to_device
from kernels.layout import MAX_EDITS, SamplingTable

_ALWAYS = 2**62  # a position that no sequence reaches
_SIGN = -(2**31)


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
    num_logprobs: int | None
    num_edits: int = 0  # of logit_bias alone
    mask: np.ndarray | None = None  # packed allowed_token_ids
    matcher: Matcher | None = None
    barred: np.ndarray | None = None  # packed tokens that min_tokens bars, where a grammar could leave nothing else


class SamplingState:
    """Sampling state of one rank's rows. table: has a further row, greedy for ever, for padding.

    matcher: makes the Matcher of a grammar; None where requests with a grammar are refused before they get here, and on
        ranks that do not choose tokens
    """

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device, matcher: Callable[[str], Matcher] | None = None
    ) -> None:
        self.table = SamplingTable.allocate(max_num_seqs + 1, vocab_size, device)
        self._device = device
        self._matcher = matcher
        self._rows: dict[int, _Row] = {}

    def start(self, new: Sequence[NewSequence]) -> None:
        """Sequences take rows; their known_token_ids are the history of those that have penalties or a grammar."""
        if not new:
            return
        table, vocab_size = self.table, self.table.vocab_size
        columns: list[list] = []
        for sequence in new:
            params = sequence.params
            row = self._rows[sequence.row] = _Row(params.logprobs, len(params.logit_bias))
            if params.allowed_token_ids is not None:
                row.mask = pack_mask(params.allowed_token_ids, vocab_size)
                self._write_masks({sequence.row: row.mask})
            if params.grammar is not None and self._matcher is not None:
                row.matcher = self._matcher(params.grammar)
                row.matcher.accept(sequence.known_token_ids[sequence.num_prompt_tokens :])
                if barred := self._barred(sequence):
                    row.barred = pack_mask(barred, vocab_size)
            if params.needs_token_counts:
                self._write_history(sequence)
            greedy = params.greedy or params.top_k == 1  # of equal best tokens the first is taken, as at temperature 0
            columns.append([
                sequence.row, 0.0 if greedy else params.temperature, params.seed or 0, params.min_p,
                params.top_k if 0 < params.top_k < vocab_size else vocab_size, params.top_p if params.top_p < 1.0 else np.inf,
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
                row.mask is not None or row.matcher is not None, self._write_edits(sequence),
            ])  # fmt: skip
        into = (
            table.temperature, table.seeds, table.min_p, table.top_k, table.top_p, table.repetition, table.presence,
            table.frequency, table.masked, table.num_edits,
        )  # fmt: skip
        dtypes = (
            np.float32,
            np.int64,
            np.float32,
            np.int32,
            np.float64,
            np.float32,
            np.float32,
            np.float32,
            np.bool_,
            np.int32,
        )
        rows, *values = zip(*columns)
        moved = to_device([np.array(rows), *(np.array(v, dtype) for v, dtype in zip(values, dtypes))], self._device)
        for column, value in zip(into, moved[1:]):
            column.index_copy_(0, moved[0], value)

    def free(self, row: int) -> None:
        self._rows.pop(row, None)

    def num_logprobs(self, row: int) -> int | None:
        return self._rows[row].num_logprobs

    def matcher(self, row: int) -> Matcher | None:
        return self._rows[row].matcher

    @property
    def any_grammar(self) -> bool:
        return any(state.matcher is not None for state in self._rows.values())

    def mask_grammars(self, matchers: Mapping[int, Matcher]) -> None:
        """Allow rows what their grammars allow next, each within the row's allowed_token_ids; nothing, where one failed.

        A text that its grammar has ended ends, whatever min_tokens says.
        """
        masks = {}
        for row, matcher in matchers.items():
            state = self._rows[row]
            allowed = matcher.mask() if matcher.error is None else np.zeros(0, np.int32)
            if state.mask is not None:
                allowed = allowed & state.mask[: len(allowed)]
            if state.barred is not None and not (allowed & ~state.barred[: len(allowed)]).any():
                self.table.num_edits[row] = state.num_edits
                state.barred = None
            masks[row] = allowed
        self._write_masks(masks)

    # ---- rows of the table

    def _write_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        packed = np.zeros((len(masks), self.table.masks.shape[1]), dtype=np.int32)
        for line, mask in zip(packed, masks.values()):
            line[: len(mask)] = mask
        rows, moved = to_device([np.array(list(masks), dtype=np.int64), packed], self._device)
        self.table.masks.index_copy_(0, rows, moved)

    def _write_history(self, new: NewSequence) -> None:
        known = np.array(new.known_token_ids, dtype=np.int64)
        prompt, output = to_device([known[: new.num_prompt_tokens], known[new.num_prompt_tokens :]], self._device)
        history = self.table.history[new.row].zero_()
        history.index_fill_(0, prompt, _SIGN)
        history.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _barred(self, new: NewSequence) -> list[int]:
        """Stop tokens that min_tokens bars for now."""
        if new.params.min_tokens <= new.num_output_tokens:
            return []
        stops = {*new.params.stop_token_ids, *new.eos_token_ids}
        return [token for token in stops if token < self.table.vocab_size]

    def _write_edits(self, new: NewSequence) -> int:
        """logit_bias, and the stop tokens that min_tokens still bars. Returns how many."""
        params = new.params
        edits = [(token, value, _ALWAYS) for token, value in params.logit_bias.items()]
        until = new.num_prompt_tokens + params.min_tokens
        edits += [(token, -np.inf, until) for token in self._barred(new)]
        assert len(edits) <= MAX_EDITS, "more end tokens than any model has"
        if edits:
            table = self.table
            arrays = [np.array(v, dtype) for v, dtype in zip(zip(*edits), (np.int32, np.float32, np.int64))]
            for column, value in zip((table.edit_tokens, table.edit_values, table.edit_until), to_device(arrays, self._device)):
                column[new.row, : len(edits)] = value
        return len(edits)


def pack_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32 [ceil(vocab / 32)] with the bits of `token_ids` set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
