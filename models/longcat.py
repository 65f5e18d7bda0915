"""LongCat-Flash: one decoder layer with two attentions and a shortcut-connected MoE, and the names of its published tensors."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from models.batch import ForwardBatch
from models.config import ModelConfig
from models.layers.mla import MLA
from models.layers.mlp import MLP
from models.layers.moe import MoE
from models.layers.norm import InputNorm, RMSNorm
from models.parallel import ParallelContext
from models.weights import Weights


class LongcatDecoderLayer:
    """Two attentions and two dense MLPs in turn; the MoE reads what the first MLP reads and joins after the second.

        x = x + attention0(norm(x));  h = norm(x);  s = moe(h);  x = x + mlp0(h)
        x = x + attention1(norm(x));  h = norm(x);               x = x + mlp1(h) + s

    Its attentions use caches 2i and 2i + 1.
    """

    def __init__(
        self, weights: Weights, config: ModelConfig, parallel: ParallelContext, cos_sin: torch.Tensor, *, index: int
    ) -> None:
        assert config.moe is not None, "every LongCat-Flash layer has experts"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        input_norms = [RMSNorm(weights.norm(f"input_layernorm.{i}", hidden), eps) for i in (0, 1)]
        self.attentions = [MLA(weights.at(f"self_attn.{i}"), config, parallel, cos_sin, 2 * index + i) for i in (0, 1)]
        post_attention_norms = [RMSNorm(weights.norm(f"post_attention_layernorm.{i}", hidden), eps) for i in (0, 1)]
        self.mlps = [MLP(weights.at(f"mlps.{i}"), hidden, config.intermediate_size, parallel) for i in (0, 1)]
        self.moe = MoE(
            weights.at("mlp"),
            config.moe,
            hidden,
            parallel,
            router="router.classifier",
            bias="router.e_score_correction_bias",
        )
        self.input_norms = [InputNorm(norm, mla.input_proj) for norm, mla in zip(input_norms, self.attentions)]
        first, second = (InputNorm(norm, mlp.gate_up) for norm, mlp in zip(post_attention_norms, self.mlps))
        self.post_attention_norms = [replace(first, keep_plain=True), second]  # the experts read the first one's rows, too

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual) whose sum enters -> (x, residual) whose sum leaves; both [T, D]."""
        rows, residual = self.input_norms[0].add(x, residual)
        rows, residual = self.post_attention_norms[0].add(self.attentions[0](rows, batch), residual)
        shortcut = self.moe(rows, batch)
        rows, residual = self.input_norms[1].add(self.mlps[0](rows), residual)
        rows, residual = self.post_attention_norms[1].add(self.attentions[1](rows, batch), residual)
        return self.mlps[1](rows) + shortcut, residual


def longcat_layers(
    weights: Weights, config: ModelConfig, parallel: ParallelContext, cos_sin: torch.Tensor
) -> list[LongcatDecoderLayer]:
    """model.layers.0 to num_decoder_layers - 1."""
    return [
        LongcatDecoderLayer(weights.at(f"layers.{i}"), config, parallel, cos_sin, index=i)
        for i in range(config.num_decoder_layers)
    ]


def is_longcat_draft_tensor(name: str, config: ModelConfig) -> bool:
    """The MTP module is published under "mtp", whatever the prefix."""
    return re.search(r"(?:^|\.)mtp\.", name) is not None
