"""Token exchange over the expert group: every rank hands its share of rows to all ranks and gets their sums back.

Each rank of a replica owns 1/tp of the replica's rows, so no row is routed twice. Shapes are fixed by the step's agreed
row count, also for a replica without rows; padded rows carry expert id -1, which costs nothing.

With `fp8_dispatch` rows travel the way FP8 experts quantize them anyway, 1.03 bytes a channel instead of 2: the experts get
the same codes and scales, and so compute the same. What comes back are sums, in the activations' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import ops
from kernels.layout import FP8, Activation, QuantizedActivation, Routing, Rows
from models.parallel import ParallelContext, SimulatedContext

_ALIGNMENT = 16  # bytes of a travelling row; kernels read 8 codes at once


@dataclass(frozen=True)
class ExpertDispatch:
    """The two halves of the exchange around the experts of one MoE layer.

    num_experts: with weights, on all ranks; num_choices: zero-computation experts included
    """

    parallel: ParallelContext
    num_experts: int
    num_choices: int

    def own_rows(self, x: torch.Tensor, agreed_rows: int) -> torch.Tensor:
        """This rank's share [ceil(rows / tp), ...] of the replica's rows, zero-padded to the agreed row count.

        agreed_rows: the largest row count of any replica; must not be smaller than x's.
        """
        if self.parallel.world_size == 1:
            return x
        rows = max(agreed_rows, x.shape[0]) if self.parallel.dp == 1 else agreed_rows
        if x.shape[0] > rows:
            raise ValueError(f"{x.shape[0]} rows, but the ranks agreed on {rows} for this step")
        share = -(-rows // self.parallel.tp)
        missing = share * self.parallel.tp - x.shape[0]
        padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x  # padding by nothing would copy
        start = self.parallel.tp_rank * share
        return padded[start : start + share]

    def own_live(self, row_mask: torch.Tensor | None, x: torch.Tensor, agreed_rows: int) -> torch.Tensor | None:
        """bool, False where a row of `own_rows(x, agreed_rows)` is padding; None when no row can be."""
        if self.parallel.world_size == 1:
            return row_mask
        if row_mask is None:
            row_mask = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        return self.own_rows(row_mask, agreed_rows)

    def gather(self, x: torch.Tensor, routing: Routing) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """Rows, router weights and expert ids of all ranks; the last two share one collective."""
        parallel = self.parallel
        if isinstance(parallel, SimulatedContext):
            ids = parallel.turned(routing.ids, self.num_experts, self.num_choices)
            return self._rows_of_all(x), parallel.ep_all_gather(routing.weights), ids
        if parallel.world_size == 1:
            return x, routing.weights, routing.ids
        routing = Routing(parallel.ep_all_gather(routing.packed))
        return self._rows_of_all(x), routing.weights, routing.ids

    def _rows_of_all(self, x: torch.Tensor) -> Rows:
        """[n, D] -> [world_size * n, D] in rank order."""
        if not self.parallel.fp8_dispatch:
            return self.parallel.ep_all_gather(x)
        q = ops.quantize_activation(x)
        codes, scales = q.data.view(torch.uint8), q.scale.contiguous().view(torch.uint8)
        width, end = codes.shape[1], codes.shape[1] + scales.shape[1]
        packed = self.parallel.ep_all_gather(torch.cat((codes, scales, codes.new_zeros(len(codes), -end % _ALIGNMENT)), dim=1))
        all_rows = QuantizedActivation(packed[:, :width].view(FP8), packed[:, width:end].view(torch.float32))
        return Activation(all_rows, None, x.dtype)

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' contributions; this rank gets those of its own rows."""
        return self.parallel.ep_reduce_scatter(y)

    def all_rows(self, y: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The replica's rows from its ranks' shares, without padding."""
        return self.parallel.tp_all_gather(y)[:num_rows]
