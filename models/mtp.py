"""Multi-token prediction: one more decoder layer that drafts the token after next, and the names of its published tensors.

    x_i = eh_proj [ norm(embedding(t_{i+1})) ; norm(h_i) ],  h_i the main model's hidden state after its final norm
    g_i = final_norm(layer(x)_i),  logits for t_{i+2} = head(g_i); a further draft step takes h := g_i

DeepSeek's layer has experts, LongCat's a dense MLP.
"""

from __future__ import annotations

import torch

from kernels import ops
from models.batch import ForwardBatch
from models.config import ModelConfig, ModelConfigError
from models.deepseek import DecoderLayer
from models.layers.embedding import Embedding
from models.layers.norm import RMSNorm
from models.parallel import ParallelContext
from models.weights import Part, Weights


class MTPHead:
    """Drafts from hidden states; shares the model's embedding and head, which published files repeat.

    Its attention uses the cache after those of the decoder layers.
    """

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        parallel: ParallelContext,
        cos_sin: torch.Tensor,
        embedding: Embedding,
    ) -> None:
        """weights: the level that holds "layers" (DeepSeek) and "mtp" (LongCat)."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        cache_index = config.num_attention_layers
        self.embedding = embedding
        if config.family == "longcat":
            module, layer = weights.at("mtp"), weights.at("mtp.layers.0")
            module.elsewhere("embed_tokens")
            norm_names, final_norm = ("enorm.m", "hnorm.m"), module.norm("norm", hidden)
            mlp, dense = "transformer_layer.mlp", True
        else:
            layer = weights.at(f"layers.{config.num_decoder_layers}")
            layer.elsewhere("embed_tokens", "shared_head.head")
            norm_names, final_norm = ("enorm", "hnorm"), layer.norm("shared_head.norm", hidden)
            mlp, dense = "mlp", False
        self.layer = DecoderLayer(layer, config, parallel, cos_sin, cache_index=cache_index, dense=dense, mlp=mlp)
        self.embedding_norm, self.hidden_norm = (RMSNorm(layer.norm(name, hidden), eps) for name in norm_names)
        self.input_proj = layer.matrix(Part.whole("eh_proj", hidden, 2 * hidden))
        self.final_norm = RMSNorm(final_norm, eps)

    def forward(self, next_ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Draft states g [T, D], for the model's `logits`; writes the draft layer's keys.

        next_ids: int64 [T]  the token after each row's own
        hidden:   [T, D]     the main model's `forward`, or a previous g
        batch:    positions and slots of the rows' own tokens
        """
        x = torch.cat((self.embedding_norm(self.embedding(next_ids)), self.hidden_norm(hidden)), dim=-1)
        x, residual = self.layer(ops.linear(x, self.input_proj), None, batch)
        return self.final_norm.add(x, residual)[0]


def require_mtp(config: ModelConfig) -> None:
    """Raise ModelConfigError when config.json announces no draft module, or more than one."""
    if config.num_mtp_layers != 1:
        raise ModelConfigError(
            f"num_nextn_predict_layers: drafting needs exactly one MTP layer, config.json has {config.num_mtp_layers}"
        )
