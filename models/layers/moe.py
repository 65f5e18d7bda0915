"""Mixture of experts: FP32 router, experts spread over all ranks, zero-computation experts, shared expert."""

from __future__ import annotations

import torch

from kernels import ops
from models.batch import ForwardBatch
from models.config import MoEConfig
from models.layers.expert_dispatch import ExpertDispatch
from models.layers.mlp import MLP
from models.parallel import ParallelContext
from models.weights import Part, Weights


class MoE:
    """Experts first_expert .. first_expert + E / ranks - 1 live here.

    router: published name of the router's matrix without ".weight"; bias: of its selection bias
    """

    def __init__(
        self, weights: Weights, config: MoEConfig, hidden: int, parallel: ParallelContext, *, router: str, bias: str
    ) -> None:
        self.config = config
        self.dispatch = ExpertDispatch(parallel, config.num_experts)
        choices = config.num_experts + config.num_zero_experts
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
        shared = config.shared_intermediate_size
        self.shared = MLP(weights.at("shared_experts"), hidden, shared, parallel) if shared else None

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        dispatch = self.dispatch
        own = dispatch.own_rows(x, batch.ep_rows)
        expert_weights, ids = self.route(own)
        live = dispatch.own_live(batch.row_mask, x, batch.ep_rows)
        if live is not None:
            ids = torch.where(live.unsqueeze(1), ids, -1)  # padded rows reach no expert
        y = dispatch.scatter(
            ops.grouped_mlp(*dispatch.gather(own, expert_weights, ids), self.gate_up, self.down, first_expert=self.first_expert)
        )
        if self.config.num_zero_experts:
            y = y + _identity_share(own, expert_weights, ids, self.config.num_experts)
        y = dispatch.all_rows(y, x.shape[0])
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights FP32 [T, K] and expert ids int32 [T, K] of rows [T, D]."""
        c = self.config
        return ops.route(
            ops.router_logits(x, self.router), self.bias, scoring=c.scoring, top_k=c.top_k, num_groups=c.num_groups, top_groups=c.top_groups,
            normalize=c.normalize, scaling_factor=c.scaling_factor,
        )  # fmt: skip


def _narrowed(router: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The router in `dtype` where that loses nothing, as when it was published in BF16: a GPU then reads half the bytes and
    multiplies on its tensor cores, for the same FP32 logits. A CPU would only convert it back at every step."""
    narrow = router.to(dtype)
    return narrow if router.is_cuda and torch.equal(narrow.float(), router) else router


def _identity_share(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """What the zero-computation experts (ids from num_experts on) contribute: their weight times the token itself."""
    weight = torch.where(ids >= num_experts, weights, 0.0).sum(dim=-1, keepdim=True)
    return (x.float() * weight).to(x.dtype)
