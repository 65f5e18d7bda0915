"""Mixture of experts: FP32 router, experts spread over all ranks, zero-computation experts, shared expert."""

from __future__ import annotations

import functools

import torch

from kernels import ops
from kernels.layout import BlockScaledWeight, Routing, Rows, plain_rows
from models.batch import ForwardBatch
from models.config import MoEConfig
from models.layers.at_once import at_once
from models.layers.expert_dispatch import ExpertDispatch
from models.layers.mlp import MLP
from models.layers.norm import InputNorm, RMSNorm
from models.parallel import ParallelContext
from models.weights import Part, Weights

OVERLAPPED_ROWS = 128  # up to here the shared expert fills the gaps of the small kernels around the experts


class MoE:
    """Experts first_expert .. first_expert + E / ranks - 1 live here.

    router: published name of the router's matrix without ".weight"; bias: of its selection bias
    load: int64 [experts here] rows that each has computed since start
    """

    def __init__(
        self, weights: Weights, config: MoEConfig, hidden: int, parallel: ParallelContext, *, router: str, bias: str
    ) -> None:
        self.config = config
        choices = config.num_experts + config.num_zero_experts
        self.dispatch = ExpertDispatch(parallel, config.num_experts, choices)
        self.router = _narrowed(weights.plain(Part.whole(router, choices, hidden), dtype=torch.float32), weights.dtype)
        self.bias = weights.bias(bias, choices) if config.has_bias else None
        local = config.num_experts // parallel.world_size
        self.first_expert = parallel.rank * local
        self.gate_up, self.down = weights.at("experts").experts(
            range(self.first_expert, self.first_expert + local),
            range(config.num_experts),
            hidden,
            config.expert_intermediate_size,
        )
        if parallel.fp8_dispatch and not isinstance(self.gate_up, BlockScaledWeight):
            raise ValueError(
                "fp8_dispatch: these experts do not quantize their rows, since their weights are not block-scaled FP8 (a CPU "
                "dequantizes such weights); leave it off"
            )
        self.load = torch.zeros(local, dtype=torch.int64, device=weights.device)
        shared = config.shared_intermediate_size
        self.shared = MLP(weights.at("shared_experts"), hidden, shared, parallel) if shared else None

    def input_norm(self, norm: RMSNorm) -> InputNorm:
        """`norm` as it makes this layer's rows: the shared expert may want them quantized, router and experts do not."""
        return InputNorm(norm, self.router if self.shared is None else self.shared.gate_up, keep_plain=True)

    def __call__(self, rows: Rows, batch: ForwardBatch) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        x, dispatch = plain_rows(rows), self.dispatch
        own = dispatch.own_rows(x, batch.ep_rows)
        live = dispatch.own_live(batch.row_mask, x, batch.ep_rows)

        def experts() -> torch.Tensor:
            routing = self.route(own, live)  # padded rows reach no expert
            gathered = dispatch.gather(own, routing)
            y = ops.grouped_mlp(*gathered, self.gate_up, self.down, first_expert=self.first_expert, load=self.load)
            y = dispatch.scatter(y)
            if self.config.num_zero_experts:
                y = y + _identity_share(own, routing, self.config.num_experts)
            return dispatch.all_rows(y, x.shape[0])

        if self.shared is None:
            return experts()
        shared = functools.partial(self.shared, rows)
        if self.dispatch.parallel.tp == 1 and x.shape[0] <= OVERLAPPED_ROWS:
            y, z = at_once(experts, shared, x.device)
        else:
            y, z = experts(), shared()
        return y + z

    def route(self, x: torch.Tensor, live: torch.Tensor | None = None) -> Routing:
        """Choices of rows [T, D]; live: bool [T] or None."""
        c = self.config
        return ops.choose_experts(
            x, self.router, self.bias, live, scoring=c.scoring, top_k=c.top_k, num_groups=c.num_groups, top_groups=c.top_groups,
            normalize=c.normalize, scaling_factor=c.scaling_factor,
        )  # fmt: skip


def _narrowed(router: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The router in `dtype` where that loses nothing, as when it was published in BF16: a GPU then reads half the bytes and
    multiplies on its tensor cores, for the same FP32 logits. A CPU would only convert it back at every step."""
    narrow = router.to(dtype)
    return narrow if router.is_cuda and torch.equal(narrow.float(), router) else router


def _identity_share(x: torch.Tensor, routing: Routing, num_experts: int) -> torch.Tensor:
    """What the zero-computation experts (ids from num_experts on) contribute: their weight times the token itself."""
    weight = torch.where(routing.ids >= num_experts, routing.weights, 0.0).sum(dim=-1, keepdim=True)
    return (x.float() * weight).to(x.dtype)
