"""DeepSeek-V2 and V3 (also Kimi-K2 and Moonlight): one decoder layer, and the names of its published tensors."""

from __future__ import annotations

import re

import torch

from models.batch import ForwardBatch
from models.config import ModelConfig
from models.layers.mla import MLA
from models.layers.mlp import MLP
from models.layers.moe import MoE
from models.layers.norm import InputNorm, RMSNorm
from models.parallel import ParallelContext
from models.weights import Weights


class DecoderLayer:
    """x = x + attention(norm(x)); x = x + mlp(norm(x)), where mlp is an MoE after the first dense layers."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        parallel: ParallelContext,
        cos_sin: torch.Tensor,
        *,
        cache_index: int,
        dense: bool,
        mlp: str = "mlp",
    ) -> None:
        """dense: no MoE; mlp: published name of the MLP or MoE."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        input_norm = RMSNorm(weights.norm("input_layernorm", hidden), eps)
        self.attention = MLA(weights.at("self_attn"), config, parallel, cos_sin, cache_index)
        post_attention_norm = RMSNorm(weights.norm("post_attention_layernorm", hidden), eps)
        self.mlp: MLP | MoE
        if dense or config.moe is None:
            self.mlp = MLP(weights.at(mlp), hidden, config.intermediate_size, parallel)
        else:
            self.mlp = MoE(weights.at(mlp), config.moe, hidden, parallel, router="gate", bias="gate.e_score_correction_bias")
        self.input_norm = InputNorm(input_norm, self.attention.input_proj)
        self.post_attention_norm = self.mlp.input_norm(post_attention_norm)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual) whose sum enters -> (x, residual) whose sum leaves; both [T, D]."""
        rows, residual = self.input_norm.add(x, residual)
        rows, residual = self.post_attention_norm.add(self.attention(rows, batch), residual)
        return self.mlp(rows, batch) if isinstance(self.mlp, MoE) else self.mlp(rows), residual


def deepseek_layers(
    weights: Weights, config: ModelConfig, parallel: ParallelContext, cos_sin: torch.Tensor
) -> list[DecoderLayer]:
    """model.layers.0 to num_decoder_layers - 1."""
    dense = config.moe.first_dense_layers if config.moe is not None else 0
    return [
        DecoderLayer(weights.at(f"layers.{i}"), config, parallel, cos_sin, cache_index=i, dense=i < dense)
        for i in range(config.num_decoder_layers)
    ]


def is_deepseek_draft_tensor(name: str, config: ModelConfig) -> bool:
    """The MTP modules are published as the layers after the last one; recognised by number, whatever the prefix."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    behind = int(match.group(1)) - config.num_decoder_layers if match is not None else -1
    return 0 <= behind < max(1, config.num_mtp_layers)
