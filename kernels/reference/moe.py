"""Expert choice and the grouped expert MLP."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from kernels.layout import Activation, BlockScaledWeight, Routing, Rows, Weight
from kernels.reference.elementwise import silu_and_mul
from kernels.reference.linear import linear, router_logits


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        if bias is None:
            group_score = grouped.amax(dim=-1)
        else:
            group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        dropped = torch.ones_like(group_score, dtype=torch.bool)
        dropped.scatter_(-1, group_score.topk(top_groups, dim=-1, sorted=False).indices, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, ids.int()


def choose_experts(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, live: torch.Tensor | None = None, **kind: Any
) -> Routing:
    weights, ids = route(router_logits(x, router), bias, **kind)
    if live is not None:
        dead = ~live.unsqueeze(1)
        weights, ids = weights.masked_fill(dead, 0.0), ids.masked_fill(dead, -1)
    return Routing.of(weights, ids)


def grouped_mlp(
    x: Rows,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    first_expert: int,
    load: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token and expert pairs are sorted by expert, so each expert that is hit costs two products over a slice."""
    tokens, top_k = ids.shape
    num_experts = (gate_up.data if isinstance(gate_up, BlockScaledWeight) else gate_up).shape[0]
    width = (x.quantized.data if isinstance(x, Activation) else x).shape[1]
    if tokens == 0:
        return torch.zeros(0, width, dtype=x.dtype, device=ids.device)
    expert = ids.flatten().long() - first_expert
    expert = torch.where((expert < 0) | (expert >= num_experts), num_experts, expert)  # the last bin is nobody's
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=num_experts + 1).tolist()  # the one host read
    local = tokens * top_k - counts.pop()
    if load is not None:
        load += torch.tensor(counts, device=load.device)

    pairs = _rows(x, order[:local] // top_k)
    outputs = torch.zeros(tokens * top_k, width, dtype=x.dtype, device=ids.device)
    if local:
        outputs[order[:local]] = _mlp_of_slices(pairs, counts, gate_up, down)
    return torch.einsum("tk,tkd->td", weights, outputs.view(tokens, top_k, -1).float()).to(x.dtype)


def _rows(x: Rows, rows: slice | torch.Tensor) -> Rows:
    return x.quantized_rows(rows) if isinstance(x, Activation) else x[rows]


def _mlp_of_slices(x: Rows, counts: list[int], gate_up: Weight, down: Weight) -> torch.Tensor:
    """Expert e's MLP of its `counts[e]` consecutive rows of x."""
    hit = [e for e, rows in enumerate(counts) if rows]
    ends = list(accumulate(counts))
    slices = {e: slice(ends[e] - counts[e], ends[e]) for e in hit}
    hidden = silu_and_mul(torch.cat([linear(_rows(x, slices[e]), _expert(gate_up, e)) for e in hit]))
    return torch.cat([linear(hidden[slices[e]], _expert(down, e)) for e in hit])


def _expert(weight: Weight, e: int) -> Weight:
    return BlockScaledWeight(weight.data[e], weight.scale[e]) if isinstance(weight, BlockScaledWeight) else weight[e]
