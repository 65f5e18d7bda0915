"""A worker from its configuration: model, cache, runner, and the scheduler's loop on top of them.

Every choice that "auto" leaves open is made here, nowhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.block_manager import BlockManager
from engine.chat import ChatTemplate
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.executor import Executor
from engine.fidelity import FidelityProbe
from engine.grammar import GrammarCompiler
from engine.hub import DEMO_MODEL, resolve_model
from engine.kv_cache import CPU_CACHE_BYTES, KVCache, bytes_per_token, num_blocks_for
from engine.model_runner import CONTEXT_TOKENS, ModelRunner
from engine.plan import NewSequence, SequenceStep, StepPlan
from engine.preflight import takes_cpu
from engine.sampling_params import SamplingParams
from engine.sampling_state import Matcher
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from kernels import ops
from kernels.layout import BLOCK_SIZE, FP8_LATENT_DIM, FP8_ROPE_DIM, CacheFormat, SamplingTable
from models.causal_lm import load_model
from models.config import ModelConfig, ModelConfigError, check_parallel, load_model_config
from models.parallel import ParallelContext

_USEFUL_CACHES = 4  # more than this many times all rows at full length is never cached: a small model leaves memory free


@dataclass(frozen=True)
class WorkerInfo:
    """What became of the configuration: sizes the scheduler and the front end validate against.

    cache_format: "fp8", "bf16" or "fp32"; num_blocks: blocks of 64 tokens for the block manager
    asynchronous: whether the next step is prepared while one runs; a CPU runs its step on the host itself, so never there
    """

    model_config: ModelConfig
    folder: Path
    num_blocks: int
    cache_format: str
    max_model_len: int
    device: str
    dtype: str
    asynchronous: bool


def create_context(config: EngineConfig, device: torch.device | str) -> ParallelContext:
    """This rank's place among those that the configuration asks for; says so when they are simulated."""
    if (world := config.simulated) is None:
        return ParallelContext.create(config.parallel.dp, config.parallel.tp, device, fp8_dispatch=config.fp8_dispatch)
    print(
        f"SIMULATION: one rank of dp {world.dp} x tp {world.tp}, dummy weights, no collectives; times only, tokens mean nothing",
        file=sys.stderr,
        flush=True,
    )
    return ParallelContext.simulated(world.dp, world.tp, fp8_dispatch=config.fp8_dispatch)


def build_worker(
    config: EngineConfig, parallel: ParallelContext, entered: Callable[[str], None] = lambda phase: None
) -> tuple[Executor, WorkerInfo]:
    """Load the model, size and allocate the cache, and build this rank's executor.

    entered: called with the name of each part that takes its time, as it begins
    Raises ConfigError, before weights are read wherever the configuration alone shows the fault.
    """
    device = resolve_device(config)
    folder = resolve_model(config.model, weights=config.load_format != "dummy")
    model_config, max_model_len = read_model(config, folder, parallel.dp, parallel.tp)
    dtype = resolve_dtype(config, device)
    fmt = resolve_cache_format(config, model_config, device, dtype)
    _check_cache(config, model_config, fmt, device)
    # The reference operations choose their work on the host, which a capture cannot record.
    with_graphs = config.cuda_graphs and device.type == "cuda" and config.kernels != "reference"
    if config.fast_start and not with_graphs:
        raise ConfigError(
            "fast_start: puts off the capture of CUDA graphs, of which a CPU and the reference operations have none"
        )
    if config.kernels == "reference":
        ops.use_backend("reference")
    entered("weights")
    try:
        model = load_model(
            folder,
            model_config,
            parallel,
            device=device,
            dtype=dtype,
            load_format=config.load_format,
            max_model_len=max_model_len,
            with_mtp=config.num_speculative_tokens > 0,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error

    entered("cache")
    probe = _probe(config, model_config, max_model_len, parallel.tp, device) if config.fidelity_fraction else None

    def runner(cache: KVCache, probe: FidelityProbe | None) -> ModelRunner:
        return ModelRunner(
            model,
            model_config,
            cache,
            parallel,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            device=device,
            num_speculative_tokens=config.num_speculative_tokens,
            ratio_acceptance=config.speculative_acceptance == "ratio",
            matcher=_Grammars(folder).matcher if parallel.tp_rank == 0 else None,
            probe=probe,
        )

    def allocate(num_blocks: int) -> KVCache:
        return KVCache.allocate(model_config, fmt, num_blocks, device, config.num_speculative_tokens)

    num_blocks = config.num_cache_blocks
    if not num_blocks:
        memory = config.cache_memory_bytes or (CPU_CACHE_BYTES if device.type == "cpu" else 0)
        if not memory:
            memory = _free_bytes(config, device, _activation_bytes(runner(allocate(1), None), config, max_model_len))
            memory -= _row_bytes(config, model_config)
        block_bytes = BLOCK_SIZE * bytes_per_token(model_config, fmt, config.num_speculative_tokens)
        most = _USEFUL_CACHES * config.scheduler.max_num_seqs * -(-max_model_len // BLOCK_SIZE)
        num_blocks = num_blocks_for(memory, block_bytes, most)
    num_blocks = _least_of_all_ranks(num_blocks, parallel, device)
    info = WorkerInfo(
        model_config=model_config,
        folder=folder,
        num_blocks=num_blocks,
        cache_format=fmt.value,
        max_model_len=max_model_len,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        asynchronous=config.async_scheduling and device.type == "cuda",
    )
    model_runner = runner(allocate(num_blocks), probe)
    if with_graphs:
        entered("graphs")
        model_runner.capture_graphs(show_progress=parallel.rank == 0, fast_start=config.fast_start)
    for experts in model.experts:
        experts.load.zero_()  # the step that sized the cache served nobody
    return Executor(model_runner, parallel), info


def _probe(config: EngineConfig, model: ModelConfig, max_model_len: int, tp: int, device: torch.device) -> FidelityProbe:
    lines = config.scheduler.max_num_batched_tokens + config.scheduler.max_num_seqs * (1 + config.num_speculative_tokens)
    return FidelityProbe(
        model,
        fraction=config.fidelity_fraction,
        max_model_len=max_model_len,
        max_lines=lines,
        num_heads=model.num_heads // tp,
        device=device,
    )


def assemble_core(config: EngineConfig, executor: Executor, info: WorkerInfo, parallel: ParallelContext) -> EngineCore:
    """What a replica's leader runs on top of its worker: the scheduler over its blocks, and the loop."""
    scheduler = Scheduler(
        config.scheduler,
        BlockManager(info.num_blocks, config.prefix_cache),
        max_model_len=info.max_model_len,
        vocab_size=info.model_config.vocab_size,
        num_speculative_tokens=config.num_speculative_tokens,
        adaptive_drafts=config.adaptive_drafts,
        dp_rank=parallel.dp_rank,
        seed=config.seed + parallel.dp_rank,  # replicas must not draw the same noise
    )
    return EngineCore(scheduler, executor, asynchronous=info.asynchronous, lockstep=parallel.has_peers)


class _Grammars:
    """Compiles the grammars of a leader's requests; the tokenizer is read when the first one comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compiler: GrammarCompiler | None = None

    def matcher(self, grammar: str) -> Matcher:
        if self._compiler is None:
            turn_end = ChatTemplate.load(self._folder).turn_end(Tokenizer.load(self._folder))
            self._compiler = GrammarCompiler.load(self._folder, turn_end)
        return self._compiler.matcher(grammar)


def read_model(config: EngineConfig, folder: Path, dp: int, tp: int) -> tuple[ModelConfig, int]:
    """The model's configuration and the context it is served with. Raises ConfigError for what config.json alone rules out."""
    try:
        model = load_model_config(folder)
        check_parallel(model, dp, tp, fp8_weights=False)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from error
    return model, resolve_max_model_len(config, model)


def resolve_device(config: EngineConfig) -> torch.device:
    """On CUDA the current device is taken."""
    return torch.device("cpu") if takes_cpu(config.device) else torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """auto is bfloat16 on CUDA and float32 on a CPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def resolve_cache_format(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> CacheFormat:
    """auto is fp8 for a 512 + 64 latent on Hopper, and for the demo model anywhere; else exact in the activations' dtype."""
    if config.cache_format != "auto":
        return CacheFormat(config.cache_format)
    fits = (model.kv_lora_rank, model.qk_rope_head_dim) == (FP8_LATENT_DIM, FP8_ROPE_DIM)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    demo = resolve_model(config.model, weights=False) == _demo_folder()
    if fits and (hopper or demo):
        return CacheFormat.FP8
    return CacheFormat.BF16 if dtype is torch.bfloat16 else CacheFormat.FP32


def _demo_folder() -> Path | None:
    try:
        return resolve_model(DEMO_MODEL)
    except ConfigError:
        return None  # an installation without the bundled model


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len > limit:
        raise ConfigError(f"max_model_len: the model's positions end at {limit}, got {config.max_model_len}")
    return config.max_model_len or limit


def _check_cache(config: EngineConfig, model: ModelConfig, fmt: CacheFormat, device: torch.device) -> None:
    """Refuse a format that does not hold the model's latent, and more blocks than the device could ever hold."""
    KVCache.allocate(model, fmt, 1, torch.device("meta"), config.num_speculative_tokens)
    block_bytes = BLOCK_SIZE * bytes_per_token(model, fmt, config.num_speculative_tokens)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.num_cache_blocks * block_bytes > total:
        raise ConfigError(
            f"num_cache_blocks: {config.num_cache_blocks} blocks of {block_bytes} bytes are more than the {total} bytes of the "
            f"device; at most {total // block_bytes} could fit, 0 takes what memory allows"
        )


def _activation_bytes(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> int:
    """Peak device memory of the largest step: a full token budget, every row sampled, one context piece expanded."""
    budget = config.scheduler.max_num_batched_tokens
    num_seqs = min(config.scheduler.max_num_seqs, budget)
    chunk = min(-(-budget // num_seqs), max_model_len)
    context = min(CONTEXT_TOKENS, max_model_len - chunk)
    params = SamplingParams(top_p=0.9, seed=0, frequency_penalty=0.1)
    steps = []
    for row in range(num_seqs):
        computed = context if row == 0 else 0
        # Every table entry is the cache's only block: its content does not matter here.
        steps.append(SequenceStep(row, computed, [0] * chunk, [0] * -(-(computed + chunk) // BLOCK_SIZE)))
    sequences = [NewSequence(row, "", params, chunk) for row in range(num_seqs)]
    torch.cuda.synchronize(runner.device)
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    runner.run(StepPlan(0, prefills=steps, new_sequences=sequences)).wait()
    return torch.cuda.max_memory_allocated(runner.device) - before


def _row_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """What the runner keeps of every row: its sampling parameters, and under ratio acceptance its drafts' distributions."""
    table = SamplingTable.allocate(config.scheduler.max_num_seqs + 1, model.vocab_size, "meta")
    drafts = config.num_speculative_tokens if config.speculative_acceptance == "ratio" else 0
    return sum(column.nbytes for column in vars(table).values()) + drafts * table.history.nbytes


def _free_bytes(config: EngineConfig, device: torch.device, activation_bytes: int) -> int:
    """Bytes for the cache: memory_fraction of the device, less what is in use and what a step needs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1.0 - config.memory_fraction) * total) - activation_bytes


def _least_of_all_ranks(num_blocks: int, parallel: ParallelContext, device: torch.device) -> int:
    return int(parallel.ep_all_gather(torch.tensor([num_blocks], device=device)).min())
