"""The language model: embedding, decoder layers, final norm, head, and the optional draft head."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from models.batch import ForwardBatch
from models.config import ModelConfig, check_parallel
from models.deepseek import deepseek_layers, is_deepseek_draft_tensor
from models.layers.embedding import Embedding, Head
from models.layers.moe import MoE
from models.layers.norm import RMSNorm
from models.layers.rope import rope_table
from models.longcat import is_longcat_draft_tensor, longcat_layers
from models.mtp import MTPHead, require_mtp
from models.parallel import ParallelContext
from models.weights import Checkpoint, Inventory, Progress, ProgressLine, RandomSource, Source, Weights


class CausalLM:
    """mtp is None unless it was asked for; its cache is the one after the decoder layers' caches."""

    def __init__(
        self, weights: Weights, config: ModelConfig, parallel: ParallelContext, *, max_model_len: int, with_mtp: bool
    ) -> None:
        model = weights.at("model")
        hidden = config.hidden_size
        self.config = config
        self.embedding = Embedding(model, "embed_tokens", config.vocab_size, hidden, parallel)
        cos_sin = rope_table(config.rope, config.qk_rope_head_dim, max_model_len, weights.device)
        build_layers = longcat_layers if config.family == "longcat" else deepseek_layers
        self.layers = build_layers(model, config, parallel, cos_sin)
        self.experts = [part for layer in self.layers for part in vars(layer).values() if isinstance(part, MoE)]
        self.norm = RMSNorm(model.norm("norm", hidden), config.rms_norm_eps)
        if config.tie_word_embeddings:
            self.head = Head(self.embedding.weight, config.vocab_size, parallel)
        else:
            self.head = Head.load(weights, "lm_head", config.vocab_size, hidden, parallel)
        self.mtp = MTPHead(model, config, parallel, cos_sin, self.embedding) if with_mtp else None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] after the final norm; writes this step's keys into the caches."""
        x, residual = self.embedding(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm.add(x, residual)[0]

    def expert_load(self) -> torch.Tensor | None:
        """int64 [MoE layers, experts of this rank] rows that each computed since start; None without experts."""
        return torch.stack([layer.load for layer in self.experts]) if self.experts else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, D] -> FP32 [n, V], whole on every rank of the replica."""
        return self.head(hidden)


def load_model(
    folder: Path,
    config: ModelConfig,
    parallel: ParallelContext,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: str = "auto",
    max_model_len: int = 0,
    with_mtp: bool = False,
    progress: Progress | None = None,
) -> CausalLM:
    """Build the model on `device` and fill it from the folder's safetensors files, or with random weights ("dummy").

    dtype: of weights that are not kept in FP8, and of activations. A CPU multiplies no FP8, so there FP8 weights are
        dequantized while they are read; on CUDA they stay FP8, but for W_UK and W_UV.
    max_model_len: positions of the RoPE table; 0 means the model's own limit
    progress: called with the bytes read and the bytes to read of this rank; by default rank 0 writes a line with the rate
    Raises ModelConfigError on sizes that cannot be split, WeightsError on a checkpoint that does not fit, both before
    any weight is read.
    """
    device = torch.device(device)
    keep_fp8 = device.type == "cuda"
    if with_mtp:
        require_mtp(config)
    max_model_len = max_model_len or config.max_position_embeddings

    def build(source: Source, where: torch.device) -> CausalLM:
        weights = Weights(source, where, dtype, keep_fp8)
        return CausalLM(weights, config, parallel, max_model_len=max_model_len, with_mtp=with_mtp)

    if load_format == "dummy":
        check_parallel(config, parallel.dp, parallel.tp, fp8_weights=keep_fp8 and config.announces_fp8)
        return build(RandomSource(config.announces_fp8), device)
    if load_format != "auto":
        raise ValueError(f"load_format: {load_format!r} is not one of auto, dummy")

    checkpoint = Checkpoint(Path(folder))
    check_parallel(config, parallel.dp, parallel.tp, fp8_weights=keep_fp8 and checkpoint.has_fp8)
    if config.announces_fp8 and not checkpoint.has_fp8:
        warnings.warn(f"{folder}: config.json announces FP8 weights, but the files hold none; read as they are", stacklevel=2)
    inventory = Inventory(checkpoint)
    build(inventory, torch.device("meta"))
    is_draft_tensor = is_longcat_draft_tensor if config.family == "longcat" else is_deepseek_draft_tensor
    inventory.check(lambda name: is_draft_tensor(name, config))
    if progress is None and parallel.rank == 0:
        progress = ProgressLine("Loading weights")
    checkpoint.bytes_total, checkpoint.progress = inventory.bytes, progress
    model = build(checkpoint, device)
    checkpoint.close()
    return model
