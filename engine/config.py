"""Configuration: frozen values, one per owner. Nothing mutates a config; derived values are returned by who derives them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from engine.errors import ConfigError

CACHE_FORMATS = ("auto", "fp8", "bf16", "fp32")
DTYPES = ("auto", "float32", "bfloat16")
ACCEPTANCES = ("exact", "ratio")
DEPTHS = ("auto", "adaptive", "fixed")
MAX_SPECULATIVE_TOKENS = 3
MAX_NUM_SEQS = 1 << 16  # every rank keeps tables of so many rows


def _check_types(config: Any) -> None:
    """Flags, texts and fractions have the type of their field's default."""
    for item in fields(config):
        value, kind = getattr(config, item.name), type(item.default)
        if kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{item.name}: must be true or false, got {value!r:.60}")
        if kind is str and not isinstance(value, str):
            raise ConfigError(f"{item.name}: must be a text, got {value!r:.60}")
        if kind is float and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ConfigError(f"{item.name}: must be a number, got {value!r:.60}")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}: must be a whole number of at least {low}, got {value!r}")


@dataclass(frozen=True)
class ParallelConfig:
    """Attention is data-parallel over dp and head-parallel over tp; experts lie over all dp * tp ranks."""

    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        _at_least("dp", self.dp, 1)
        _at_least("tp", self.tp, 1)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_batched_tokens: query tokens of one step; max_num_seqs: sequences that hold rows at once;
    prefill_chunk: most prompt tokens one sequence may spend in a step (0: the whole budget);
    max_queued_requests: waiting requests beyond which new ones are refused (0: no limit); policy: fcfs or priority;
    max_skips: how often a waiting request may be overtaken by later ones that fit, before it blocks them;
    speculative_max_batch: no drafts are made while more sequences than this run at once (0: always draft)."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    prefill_chunk: int = 0
    max_queued_requests: int = 4096
    policy: str = "fcfs"
    max_skips: int = 64
    speculative_max_batch: int = 0

    def __post_init__(self) -> None:
        _check_types(self)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(f"max_num_seqs: at most {MAX_NUM_SEQS}, got {self.max_num_seqs}")
        _at_least("prefill_chunk", self.prefill_chunk, 0)
        _at_least("max_queued_requests", self.max_queued_requests, 0)
        _at_least("max_skips", self.max_skips, 0)
        _at_least("speculative_max_batch", self.speculative_max_batch, 0)
        _choice("policy", self.policy, ("fcfs", "priority"))


@dataclass(frozen=True)
class EngineConfig:
    """Everything one engine needs to know; the CLI and `LLM` both build it.

    model: local folder or hub id; served_model_name: name the API shows (default: model)
    dtype: of weights that are not FP8 and of activations; auto is bfloat16 on CUDA and float32 on a CPU
    cache_format: auto is fp8 where the model's latent is 512 + 64, on Hopper and for the demo model, else bf16
    device: auto, cpu, cuda; kernels: auto or reference (plain torch operations on a CUDA device)
    load_format: auto (checkpoint) or dummy (random weights from config.json alone)
    max_model_len: 0 means the model's own limit; num_cache_blocks: 0 means as many as memory allows
    cache_memory_bytes: bytes of cache per rank; 0 means memory_fraction of free device memory (CPU: 1 GiB)
    simulate_world: "dp=8,tp=1,ep=8" makes this one process hold and compute what one rank of that many would, with dummy
        weights and without collectives: for timing only, its tokens mean nothing. ep may be left out, it is dp * tp
    fast_start: capture few CUDA graphs before serving, the others while it does
    fp8_dispatch: rows travel to FP8 experts of other ranks as those quantize them: half the bytes, the same results
    speculative_acceptance: exact (drafts that equal the token the plain path samples) or ratio (min(1, p / q): the same
        distribution, more accepted drafts, other tokens than without speculation); see engine/speculative.py
    speculative_depth: adaptive (none for sizes of batches where drafts are measured not to pay; engine/draft_depth.py) or fixed;
        auto is adaptive under exact acceptance and fixed under ratio acceptance, where a seeded text depends on the depth
    fidelity_fraction: part of the steps in which attention is compared with exact attention (engine/fidelity.py); 0 is off
    """

    model: str
    served_model_name: str = ""
    dtype: str = "auto"
    cache_format: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    load_format: str = "auto"
    max_model_len: int = 0
    num_cache_blocks: int = 0
    cache_memory_bytes: int = 0
    memory_fraction: float = 0.9
    prefix_cache: bool = True
    cuda_graphs: bool = True
    fast_start: bool = False
    fp8_dispatch: bool = False
    async_scheduling: bool = True
    num_speculative_tokens: int = 0
    speculative_acceptance: str = "exact"
    speculative_depth: str = "auto"
    simulate_world: str = ""
    seed: int = 0
    fidelity_fraction: float = 0.0
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _check_types(self)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model: must be a folder or a hub id, as text, got {self.model!r:.60}")
        _choice("dtype", self.dtype, DTYPES)
        _choice("cache_format", self.cache_format, CACHE_FORMATS)
        _choice("device", self.device, ("auto", "cpu", "cuda"))
        _choice("kernels", self.kernels, ("auto", "reference"))
        _choice("load_format", self.load_format, ("auto", "dummy"))
        _at_least("max_model_len", self.max_model_len, 0)
        _at_least("num_cache_blocks", self.num_cache_blocks, 0)
        _at_least("cache_memory_bytes", self.cache_memory_bytes, 0)
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(f"num_speculative_tokens: at most {MAX_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}")
        _choice("speculative_acceptance", self.speculative_acceptance, ACCEPTANCES)
        _choice("speculative_depth", self.speculative_depth, DEPTHS)
        for owner, name, default in (
            (self, "speculative_acceptance", "exact"),
            (self, "speculative_depth", "auto"),
            (self.scheduler, "speculative_max_batch", 0),
        ):
            value = getattr(owner, name)
            if value != default and not self.num_speculative_tokens:
                raise ConfigError(f"{name}: {value} is for drafts, and num_speculative_tokens is 0: there are none")
        if self.fast_start and not self.cuda_graphs:
            raise ConfigError("fast_start: puts off the capture of CUDA graphs, and cuda_graphs is off")
        if self.speculative_acceptance == "ratio" and self.speculative_depth == "adaptive":
            raise ConfigError(
                "speculative_depth: under ratio acceptance a seeded request's text depends on the depth, so it must not follow the "
                "load: take fixed, or exact acceptance"
            )
        _at_least("seed", self.seed, 0)
        if self.scheduler.max_num_batched_tokens <= self.num_speculative_tokens:
            raise ConfigError(
                f"max_num_batched_tokens: one sequence needs {1 + self.num_speculative_tokens}, "
                f"got {self.scheduler.max_num_batched_tokens}"
            )
        if not 0.0 <= self.fidelity_fraction <= 1.0:
            raise ConfigError(f"fidelity_fraction: must lie in [0, 1], got {self.fidelity_fraction}")
        if not 0.0 < self.memory_fraction < 1.0:
            raise ConfigError(f"memory_fraction: must lie between 0 and 1, got {self.memory_fraction}")
        if self.simulated is not None and self.load_format != "dummy":
            raise ConfigError("simulate_world: a rank without its peers computes nonsense; it takes load_format dummy only")
        if self.fp8_dispatch and (self.simulated or self.parallel).world_size == 1:
            raise ConfigError("fp8_dispatch: one rank has all experts, so no row travels; leave it off")
        if self.simulated is not None and self.parallel.world_size > 1:
            raise ConfigError(f"simulate_world: runs in one process, but dp * tp is {self.parallel.world_size}; make both 1")

    @property
    def adaptive_drafts(self) -> bool:
        """Whether the depth of drafts follows what is measured."""
        return self.speculative_depth != "fixed" and self.speculative_acceptance == "exact"

    @property
    def simulated(self) -> ParallelConfig | None:
        """The deployment of which one rank is simulated. Raises ConfigError for a simulate_world that names none."""
        if not self.simulate_world:
            return None
        sizes: dict[str, int] = {}
        for part in self.simulate_world.split(","):
            name, _, size = part.partition("=")
            if name not in ("dp", "tp", "ep") or name in sizes or not size.isdecimal():
                raise ConfigError(f"simulate_world: expected dp=N,tp=N,ep=N, got {self.simulate_world!r}")
            sizes[name] = int(size)
        world = ParallelConfig(sizes.get("dp", 1), sizes.get("tp", 1))
        if sizes.get("ep", world.world_size) != world.world_size:
            raise ConfigError(f"simulate_world: experts lie over all dp * tp = {world.world_size} ranks, got ep={sizes['ep']}")
        return world

    @property
    def api_name(self) -> str:
        """The model's name in every response and result; that of a simulated rank says so."""
        name, world = self.served_model_name or self.model, self.simulated
        return name if world is None else f"simulated-rank-of-dp{world.dp}-tp{world.tp}:{name}"


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side.

    host: address to listen on; anything but a loopback address wants an API key
    port: 0 takes a free one and prints it
    api_keys: any of them opens every route; none means no check
    chat_template: file with a Jinja template in place of the model's
    tool_call_parser, reasoning_parser: auto (from the model), none, or the name of a format
    max_body_bytes, max_header_bytes: larger requests are refused with 413 and 431
    drain_s: seconds that open requests get to finish after SIGTERM
    heartbeat_s: a rank, or the front end, that is silent for so long is dead
    stall_s: an engine that is busy but has finished no step for so long is dead
    access_log: one JSON line per finished request on stdout
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    chat_template: str = ""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    drain_s: float = 20.0
    heartbeat_s: float = 3.0
    stall_s: float = 300.0
    access_log: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        _at_least("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port: at most 65535, got {self.port}")
        _at_least("max_body_bytes", self.max_body_bytes, 1024)
        _at_least("max_header_bytes", self.max_header_bytes, 1024)
        for name in ("drain_s", "heartbeat_s", "stall_s"):
            if not 0.0 < getattr(self, name) <= 86400.0:
                raise ConfigError(f"{name}: must lie in (0, 86400] seconds, got {getattr(self, name)}")
        if any(not key for key in self.api_keys):
            raise ConfigError("api_key: must not be empty")


@dataclass(frozen=True)
class FrontEndConfig:
    """What rank 0 tells the front end process: one JSON line on its standard input.

    model_folder: where `engine.model` was found; bind: address the workers' socket listens on
    """

    engine: EngineConfig
    server: ServerConfig
    model_folder: str
    bind: str = "127.0.0.1"
