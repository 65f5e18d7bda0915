"""A probe that compares FP8 attention with exact attention while the engine serves.

A few sequences keep a shadow: an exact cache of their own, written from the same latents and keys as the FP8 cache at every
step. In a sampled fraction of the steps every layer's decode queries of these sequences also attend to the shadow, unquantized,
and the relative L2 distance of the two outputs is the layer's error of that step. Only layers see unquantized values, so they
call the probe (models/batch.py says what they tell it); it costs nothing where there is none.

Writing the shadow is part of the captured graphs; a step that compares runs eagerly. Which steps compare depends on their
count alone, so that all ranks choose the same ones. Layers report the heads of the leader's rank.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.plan import StepPlan
from engine.staging import to_device
from kernels import ops
from kernels.layout import BLOCK_SIZE, CacheFormat, LatentCache
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
        self._slots = torch.full((max_lines,), -1, dtype=torch.int64, device=device)  # static: graphs read it
        self._num_slots = 0  # lines of it that the last step set
        self._errors = torch.zeros(model.num_attention_layers, device=device)
        self._shadow_of: dict[int, int] = {}  # row -> shadow
        self._steps = 0
        self.comparing = False  # whether this step compares, on every rank alike
        self._writes = True  # captures happen before the first step and must record the writing
        self._rows: torch.Tensor | None = None  # decode sequences of this step to compare, and their shadows
        self._shadow_rows: torch.Tensor | None = None

    def follow(
        self, plan: StepPlan, rows: np.ndarray, positions: np.ndarray, live: np.ndarray, ahead: torch.Tensor | None
    ) -> None:
        """Take a step: which lines go into shadows, which sequences are compared. rows, positions, live: [T] of its lines.

        ahead: int64 [decode sequences], how much further their lines are than `positions` says; None if no further
        """
        most_ahead = max((step.drafts_in_flight for step in plan.decodes), default=0)
        for row in (*plan.freed_rows, *(new.row for new in plan.new_sequences)):
            self._shadow_of.pop(row, None)
        for step in plan.prefills:
            free = set(range(SEQUENCES)) - set(self._shadow_of.values())
            # Only a sequence that computes its first token here can have a whole shadow: a cached prefix has no exact values.
            if step.num_computed == 0 and step.row not in self._shadow_of and free:
                self._shadow_of[step.row] = min(free)
        slots = np.full(len(rows), -1, dtype=np.int64)
        for row, shadow in list(self._shadow_of.items()):
            mine = (rows == row) & live
            if mine.any() and positions[mine].max() + most_ahead >= self._capacity:
                del self._shadow_of[row]
            else:
                slots[mine] = shadow * self._capacity + positions[mine]
        self._writes = bool((slots >= 0).any())
        self._steps += 1
        self.comparing = int(self._steps * self._fraction) > int((self._steps - 1) * self._fraction)
        followed = [(i, self._shadow_of[step.row]) for i, step in enumerate(plan.decodes) if step.row in self._shadow_of]
        pairs = np.array(followed, dtype=np.int64).reshape(-1, 2) if self.comparing else np.zeros((0, 2), np.int64)
        self._rows = self._shadow_rows = None
        count = len(slots) if self._writes else 0
        if count < self._num_slots:
            self._slots[count : self._num_slots].fill_(-1)
        self._num_slots = count
        if not count:
            return
        arrays = [slots, pairs[:, 0].copy(), pairs[:, 1].copy()] if len(pairs) else [slots]
        moved, *compared = to_device(arrays, self._device)
        self._slots[:count].copy_(moved)
        if ahead is not None:
            lines = self._slots[: len(ahead) * plan.query_len].view(len(ahead), -1)
            lines += torch.where(lines >= 0, ahead[:, None], 0)
        if compared:
            self._rows, self._shadow_rows = compared

    def forget_step(self) -> None:
        """A pass that belongs to no step comes next: it must write no shadow and compare nothing, but if it is captured its
        writing must be."""
        self._slots.fill_(-1)
        self._writes, self.comparing = True, False
        self._rows = self._shadow_rows = None

    def errors(self) -> torch.Tensor | None:
        """FP32 [layers] relative L2 error of the step just run; None if nothing was compared."""
        return None if self._rows is None else self._errors.clone()

    # ---- called by the layers

    def append(
        self,
        layer: int,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        norm_weight: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        eps: float,
    ) -> None:
        if self._writes and layer < len(self._shadows):  # the draft layer has no shadow
            slots = self._slots[: latent.shape[0]]
            ops.append_kv(self._shadows[layer], latent, k_rope, norm_weight, positions, cos_sin, slots, eps=eps)

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
        if self._rows is None or self._shadow_rows is None or layer >= len(self._shadows):
            return
        rows, (b, s) = self._rows, out.shape[:2]

        def picked(x: torch.Tensor) -> torch.Tensor:
            return x[: b * s].unflatten(0, (b, s)).index_select(0, rows).flatten(0, 1)

        query = ops.quantize_q(picked(q_content), picked(q_rope), picked(positions), cos_sin, fmt=self._format)
        seq_lens = meta.seq_lens.index_select(0, rows)
        exact, _ = ops.mla_decode(
            query.unflatten(len(rows), s),
            self._shadows[layer],
            self._tables.index_select(0, self._shadow_rows),
            seq_lens,
            None if meta.num_query is None else meta.num_query.index_select(0, rows),
            softmax_scale=softmax_scale,
            causal=True,
            plan=ops.plan_decode(seq_lens, query_len=s, num_heads=self._num_heads, fmt=self._format),
            out_dtype=out.dtype,
        )
        difference = out.index_select(0, rows).float() - exact.float()
        self._errors[layer] = difference.norm() / exact.float().norm()
