"""`python -m engine.capacity MODEL --gpus 8 --dp 8 --tp 1 --context 131072`: what fits, before any weight is read.

Works from config.json alone. The model is built as the engine builds it, on torch's meta device, so the bytes of a rank
are those of the tensors it would hold; only the room for activations is an estimate (the engine measures it).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import MAX_SPECULATIVE_TOKENS, ParallelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.hub import resolve_model
from engine.kv_cache import bytes_per_token, num_blocks_for
from kernels.layout import BLOCK_SIZE, FP8, FP8_LATENT_DIM, FP8_ROPE_DIM, CacheFormat
from models.causal_lm import CausalLM
from models.config import ModelConfig, ModelConfigError, check_parallel, load_model_config
from models.layers.embedding import Embedding, Head
from models.layers.mla import MLA
from models.layers.mlp import MLP
from models.layers.moe import MoE
from models.mtp import MTPHead, require_mtp
from models.parallel import ParallelContext
from models.weights import RandomSource, Weights

H200_GIB = 139.8
PARTS: dict[type, str] = {
    Embedding: "embedding and head", Head: "embedding and head", MLA: "attention", MLP: "dense and shared MLP",
    MoE: "routed experts", MTPHead: "draft head",
}  # fmt: skip


@dataclass(frozen=True)
class CachePlan:
    """Of one cache format: what a token costs on a rank, and how much fits a replica."""

    format: str
    bytes_per_token: int
    num_blocks: int
    sequences_per_replica: int


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank; the cache is whole on every rank of a replica, so a replica's capacity is a rank's."""

    architecture: str
    dp: int
    tp: int
    context: int
    device_bytes: int
    usable_bytes: int
    weight_bytes: dict[str, int]
    activation_bytes: int
    caches: list[CachePlan]

    @property
    def total_weight_bytes(self) -> int:
        return sum(self.weight_bytes.values())

    @property
    def cache_bytes(self) -> int:
        return self.usable_bytes - self.total_weight_bytes - self.activation_bytes


def plan_capacity(
    config: ModelConfig,
    parallel: ParallelConfig,
    scheduler: SchedulerConfig,
    *,
    context: int,
    device_bytes: int,
    memory_fraction: float = 0.9,
    num_speculative_tokens: int = 0,
) -> Plan:
    """Raises ConfigError when the sizes cannot be split like this or the context is beyond the model's."""
    if context > config.max_position_embeddings:
        raise ConfigError(f"context: the model's positions end at {config.max_position_embeddings}, got {context}")
    try:
        weights = weight_bytes(config, parallel, with_mtp=num_speculative_tokens > 0)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error
    usable = int(device_bytes * memory_fraction)
    activations = activation_bytes(config, parallel, scheduler)
    free = usable - sum(weights.values()) - activations
    caches = []
    for fmt in (CacheFormat.FP8, CacheFormat.BF16):
        if fmt is CacheFormat.FP8 and (config.kv_lora_rank, config.qk_rope_head_dim) != (FP8_LATENT_DIM, FP8_ROPE_DIM):
            continue
        token_bytes = bytes_per_token(config, fmt, num_speculative_tokens)
        block_bytes = BLOCK_SIZE * token_bytes
        blocks = num_blocks_for(free, block_bytes, free // block_bytes) if free >= 2 * block_bytes else 0
        caches.append(CachePlan(fmt.value, token_bytes, blocks, blocks // math.ceil(context / BLOCK_SIZE)))
    return Plan(
        architecture=config.architecture,
        dp=parallel.dp,
        tp=parallel.tp,
        context=context,
        device_bytes=device_bytes,
        usable_bytes=usable,
        weight_bytes=weights,
        activation_bytes=activations,
        caches=caches,
    )


def weight_bytes(config: ModelConfig, parallel: ParallelConfig, *, with_mtp: bool) -> dict[str, int]:
    """Bytes by part that rank 0 holds on a GPU (BF16, and FP8 where the checkpoint is). Raises ModelConfigError."""
    check_parallel(config, parallel.dp, parallel.tp, fp8_weights=config.announces_fp8)
    if with_mtp:
        require_mtp(config)
    weights = Weights(_Shapes(config.announces_fp8), torch.device("meta"), torch.bfloat16, keep_fp8=True)
    ranks = ParallelContext.simulated(parallel.dp, parallel.tp)
    model = CausalLM(weights, config, ranks, max_model_len=1, with_mtp=with_mtp)
    sizes: Counter[str] = Counter()
    _measure(model, "norms and tables", sizes, set())
    return dict(sizes)


def activation_bytes(config: ModelConfig, parallel: ParallelConfig, scheduler: SchedulerConfig) -> int:
    """Estimate of the largest step's temporaries: a full token budget on every replica, BF16.

    Counted are a few copies of the hidden rows, queries and expanded keys and values of this rank's heads, the rows that
    the expert exchange gathers from all replicas with their intermediate products, FP32 logits, and the histories that
    penalties count.
    """
    tokens = scheduler.max_num_batched_tokens
    heads = config.num_heads // parallel.tp
    rows = 6 * tokens * config.hidden_size + 2 * tokens * heads * (2 * config.qk_head_dim + config.v_head_dim)
    if (moe := config.moe) is not None:
        gathered = tokens * parallel.dp
        routed = gathered * moe.top_k // parallel.world_size
        rows += 3 * gathered * config.hidden_size + routed * (2 * config.hidden_size + 3 * moe.expert_intermediate_size)
    logits = 4 * 4 * min(scheduler.max_num_seqs, tokens) * config.vocab_size
    return 2 * rows + logits


class _Shapes(RandomSource):
    """Tensors without data."""

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], device: torch.device) -> torch.Tensor:
        size = [part.stop - part.start for part in index]
        return torch.empty(size, dtype=FP8 if self.is_fp8(name) and len(shape) > 1 else torch.float32, device=device)


def _measure(value: Any, part: str, sizes: Counter[str], seen: set[int]) -> None:
    """Add the bytes of every tensor under `value`, each storage once, to the part it belongs to."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            sizes[part] += storage.nbytes()
    elif isinstance(value, (list, tuple)):
        for item in value:
            _measure(item, part, sizes, seen)
    elif id(value) not in seen and hasattr(value, "__dict__") and not isinstance(value, (ModelConfig, ParallelContext, type)):
        seen.add(id(value))
        own = part if part == PARTS[MTPHead] else PARTS.get(type(value), part)
        for item in vars(value).values():
            _measure(item, own, sizes, seen)


def describe(plan: Plan) -> str:
    """The plan as text; GB are 10^9 bytes."""
    lines = [
        f"{plan.architecture}: {plan.dp * plan.tp} GPUs, dp {plan.dp} x tp {plan.tp}, experts over {plan.dp * plan.tp} ranks",
        "",
        f"per GPU: {plan.device_bytes / 1e9:.1f} GB, of which {plan.usable_bytes / 1e9:.1f} GB may be used",
    ]
    lines += [
        f"  {part:<24}{size / 1e9:>8.2f} GB" for part, size in sorted(plan.weight_bytes.items(), key=lambda item: -item[1])
    ]
    lines += [
        f"  {'= weights':<24}{plan.total_weight_bytes / 1e9:>8.2f} GB",
        f"  {'activations (estimate)':<24}{plan.activation_bytes / 1e9:>8.2f} GB",
        f"  {'left for the cache':<24}{plan.cache_bytes / 1e9:>8.2f} GB",
        "",
        f"cache   bytes/token   tokens a replica   sequences of {plan.context} tokens: a replica, all",
    ]
    for cache in plan.caches:
        tokens, sequences = cache.num_blocks * BLOCK_SIZE, cache.sequences_per_replica
        lines.append(f"{cache.format:<8}{cache.bytes_per_token:>11,}{tokens:>19,}{sequences:>14,}, {sequences * plan.dp:,}")
    if plan.cache_bytes <= 0:
        lines += ["", f"does not fit: {-plan.cache_bytes / 1e9:.1f} GB too much a GPU; use more GPUs or a larger tp"]
    elif all(cache.sequences_per_replica == 0 for cache in plan.caches):
        lines += ["", "no sequence of this length fits; use more GPUs, a larger tp or a shorter context"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when at least one sequence fits, 1 when none does, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m engine.capacity", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("model", help="local folder or hub id (only its configuration is fetched)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="must equal dp * tp where given")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel replicas (default: 1)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks a replica (default: 1)")
    parser.add_argument("--context", type=int, default=0, metavar="N", help="tokens of a sequence (default: the model's limit)")
    parser.add_argument(
        "--gpu-gib", type=float, default=H200_GIB, metavar="X", help=f"memory of one GPU (default: {H200_GIB}, an H200)"
    )
    parser.add_argument("--memory-fraction", type=float, default=0.9, metavar="X", help="part that may be used (default: 0.9)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=SchedulerConfig.max_num_batched_tokens, metavar="N")
    parser.add_argument("--max-num-seqs", type=int, default=SchedulerConfig.max_num_seqs, metavar="N")
    parser.add_argument("--num-speculative-tokens", type=int, default=0, metavar="N", help="with the model's draft layer")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the text")
    args = parser.parse_args(argv)
    try:
        parallel = ParallelConfig(args.dp, args.tp)
        scheduler = SchedulerConfig(max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=args.max_num_seqs)
        if args.gpus and args.gpus != parallel.world_size:
            raise ConfigError(
                f"--gpus {args.gpus}: --dp {args.dp} times --tp {args.tp} is {parallel.world_size}; make them equal"
            )
        if not 0.0 < args.memory_fraction <= 1.0 or not 0.0 < args.gpu_gib < math.inf:
            raise ConfigError("--memory-fraction must lie in (0, 1] and --gpu-gib above 0")
        if not 0 <= args.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"--num-speculative-tokens: must lie in 0..{MAX_SPECULATIVE_TOKENS}, got {args.num_speculative_tokens}"
            )
        try:
            config = load_model_config(_folder(args.model))
        except ModelConfigError as error:
            raise ConfigError(str(error)) from error
        if args.context < 0:
            raise ConfigError(f"--context: must be at least 1, got {args.context}")
        plan = plan_capacity(
            config,
            parallel,
            scheduler,
            context=args.context or config.max_position_embeddings,
            device_bytes=int(args.gpu_gib * 2**30),
            memory_fraction=args.memory_fraction,
            num_speculative_tokens=args.num_speculative_tokens,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(plan)) if args.json else describe(plan))
    return 0 if any(cache.sequences_per_replica for cache in plan.caches) else 1


def _folder(model: str) -> Path:
    """Also the path of a config.json itself is taken."""
    path = Path(model)
    return path.parent if path.name == "config.json" and path.is_file() else resolve_model(model, weights=False)


if __name__ == "__main__":
    sys.exit(main())
