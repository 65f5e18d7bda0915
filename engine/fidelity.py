"""A probe that compares FP8 attention with exact attention while the engine serves.

A few sequences keep a shadow: an exact cache of their own, written by the launch that writes the FP8 cache, at every step. In
a sampled fraction of the steps every layer's decode queries of these sequences also attend to the shadow, unquantized, and the
relative L2 distance of the two outputs is the layer's error of that step. Only layers see unquantized values, so they call the
probe (models/batch.py says what they tell it); it costs nothing where there is none.

What changes from step to step lies in static tensors, so that steps replay graphs: those that compare replay graphs of their
own (engine/cuda_graph.py). Which steps compare depends on their count alone, so that all ranks choose the same ones. Layers
report the heads of the leader's rank.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.plan import SequenceStep, StepPlan
from engine.staging import to_device
from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, ExactCopy, LatentCache
from models.batch import AttentionMetadata
from models.config import ModelConfig

SEQUENCES = 2  # that keep a shadow at once
MAX_TOKENS = 16384  # of a shadowed sequence; one that grows longer loses its shadow


class FidelityProbe:
    """One rank's probe. fraction: of the steps that compare; max_lines: most lines of a forward pass."""

    def __init__(
        self, model: ModelConfig, *, fraction: float, max_model_len: int, max_lines: int, num_heads: int, device: torch.device
    ) -> None:
        self._fraction, self._num_heads, self._device = fraction, num_heads, device
        blocks = -(-min(max_model_len, MAX_TOKENS) // BLOCK_SIZE)
        self._capacity = blocks * BLOCK_SIZE
        # No kernel of the device reads an FP32 cache, and BF16 is exact enough beside E4M3.
        self._format = CacheFormat.BF16 if device.type == "cuda" else CacheFormat.FP32
        self._shadows = [
            LatentCache.allocate(self._format, SEQUENCES * blocks, model.kv_lora_rank, model.qk_rope_head_dim, device)
            for _ in range(model.num_attention_layers)
        ]
        self._tables = torch.arange(SEQUENCES * blocks, dtype=torch.int32, device=device).view(SEQUENCES, blocks)
        self._starts = torch.full((max_lines,), -1, dtype=torch.int64, device=device)  # of each line's sequence in the shadows
        self._marked: list[tuple[int, int, int]] = []  # what _starts says, as _mark takes it
        # Decode sequences to compare and their shadows; entries that are not live compare nothing.
        self._compared, self._compared_shadows = torch.zeros(2, SEQUENCES, dtype=torch.int64, device=device)
        self._live = torch.zeros(SEQUENCES, dtype=torch.int32, device=device)
        self._errors = torch.zeros(model.num_attention_layers, device=device)
        self._shadow_of: dict[int, int] = {}  # row -> shadow
        self._places: list[tuple[int, int]] = []  # decode sequences of the last step with a shadow: where, and their rows
        self._query_len = 1  # of the last step
        self._steps = 0
        self._finds = False  # whether this step leaves errors to read
        self.comparing = False  # whether this step compares, on every rank alike

    def follow(self, plan: StepPlan) -> None:
        """Take a step: which of its lines go into shadows, which sequences are compared."""
        if not self._goes_on(plan):
            self._look(plan)
        self._steps += 1
        self.comparing = int(self._steps * self._fraction) > int((self._steps - 1) * self._fraction)
        self._finds = self.comparing and bool(self._places)
        if self.comparing:
            self._choose([(index, self._shadow_of[row]) for index, row in self._places])

    def _goes_on(self, plan: StepPlan) -> bool:
        """Whether the plan decodes every shadowed sequence where the last one did, within its shadow, and does nothing else with
        shadows: nearly always, and on the host of a small model every microsecond of a step counts."""
        if plan.prefills or plan.freed_rows or plan.new_sequences or plan.query_len != self._query_len:
            return False
        decodes = plan.decodes
        for index, row in self._places:
            if index >= len(decodes) or decodes[index].row != row or _last_position(decodes[index]) >= self._capacity:
                return False
        return len(self._places) == len(self._shadow_of)

    def _look(self, plan: StepPlan) -> None:
        """Give shadows to sequences that begin, take them from those that end or grow too long, find the lines of the others."""
        for row in (*plan.freed_rows, *(new.row for new in plan.new_sequences)):
            self._shadow_of.pop(row, None)
        for step in plan.prefills:
            free = set(range(SEQUENCES)) - set(self._shadow_of.values())
            # Only a sequence that computes its first token here can have a whole shadow: a cached prefix has no exact values.
            if step.num_computed == 0 and step.row not in self._shadow_of and free:
                self._shadow_of[step.row] = min(free)
        for step in (*plan.decodes, *plan.prefills):
            if _last_position(step) >= self._capacity:
                self._shadow_of.pop(step.row, None)
        query_len = plan.query_len
        lines: list[tuple[int, int, int]] = []  # first line of a sequence, end, shadow
        for index, step in enumerate(plan.decodes):
            if step.row in self._shadow_of:
                lines.append((index * query_len, (index + 1) * query_len, self._shadow_of[step.row]))
        first = len(plan.decodes) * query_len
        for step in plan.prefills:
            if step.row in self._shadow_of:
                lines.append((first, first + step.num_tokens, self._shadow_of[step.row]))
            first += step.num_tokens
        self._mark(lines)
        self._places = [(index, step.row) for index, step in enumerate(plan.decodes) if step.row in self._shadow_of]
        self._query_len = query_len

    def _mark(self, lines: list[tuple[int, int, int]]) -> None:
        """Bring _starts up to date with (first line, end, shadow) of each; while the same sequences decode, it is."""
        if lines == self._marked:
            return
        starts = np.full(max(end for _, end, _ in (*lines, *self._marked)), -1, dtype=np.int64)
        for first, end, shadow in lines:
            starts[first:end] = shadow * self._capacity
        (moved,) = to_device([starts], self._device)
        self._starts[: len(moved)].copy_(moved)
        self._marked = lines

    def _choose(self, pairs: list[tuple[int, int]]) -> None:
        padded = np.array((pairs + [(0, 0)] * SEQUENCES)[:SEQUENCES], dtype=np.int64)
        live = (np.arange(SEQUENCES) < len(pairs)).astype(np.int32)
        arrays = to_device([padded[:, 0].copy(), padded[:, 1].copy(), live], self._device)
        for static, moved in zip((self._compared, self._compared_shadows, self._live), arrays):
            static.copy_(moved)

    def forget_step(self, compares: bool) -> None:
        """A pass that belongs to no step comes next. Its lines have no slots, so that it writes no shadow; compares: whether it
        is recorded as one that compares, here with nothing."""
        self._live.zero_()
        self._compared.zero_()
        self.comparing, self._finds = compares, False

    def errors(self) -> torch.Tensor | None:
        """FP32 [layers] relative L2 error of the step just run; None if nothing was compared."""
        return self._errors.clone() if self._finds else None

    # ---- called by the layers

    def copy(self, layer: int, rows: int) -> ExactCopy | None:
        """See AttentionProbe; the draft layer has no shadow."""
        return ExactCopy(self._shadows[layer], self._starts[:rows]) if layer < len(self._shadows) else None

    def compare(
        self,
        layer: int,
        q_content: torch.Tensor,
        q_rope: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        softmax_scale: float,
    ) -> None:
        """See AttentionProbe."""
        if layer >= len(self._shadows):
            return
        rows, (b, s) = self._compared, out.shape[:2]

        def picked(x: torch.Tensor) -> torch.Tensor:
            return x[: b * s].unflatten(0, (b, s)).index_select(0, rows).flatten(0, 1)

        query = ops.quantize_q(picked(q_content), picked(q_rope), picked(positions), cos_sin, fmt=self._format)
        seq_lens = meta.seq_lens.index_select(0, rows) * self._live
        exact, _ = ops.mla_decode(
            query.unflatten(SEQUENCES, s),
            self._shadows[layer],
            self._tables.index_select(0, self._compared_shadows),
            seq_lens,
            None if meta.num_query is None else meta.num_query.index_select(0, rows),
            softmax_scale=softmax_scale,
            causal=True,
            plan=ops.plan_decode(seq_lens, query_len=s, num_heads=self._num_heads, fmt=self._format),
            out_dtype=out.dtype,
        )
        measured = torch.where(self._live[:, None, None, None] > 0, out.index_select(0, rows).float(), 0.0)
        exact = exact.float()
        self._errors[layer] = (measured - exact).norm() / exact.norm()


def _last_position(step: SequenceStep) -> int:
    """No line of a sequence lies further in a step."""
    return step.num_computed + step.num_tokens - 1 + step.num_drafts + step.drafts_in_flight
