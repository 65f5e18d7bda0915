"""Command-line flags: one for every field of EngineConfig, its parts and ServerConfig, made from the fields themselves."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import Any

from engine.config import (
    ACCEPTANCES,
    CACHE_FORMATS,
    DEPTHS,
    DTYPES,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from engine.errors import ConfigError
from engine.hub import DEMO_MODEL

CHOICES = {
    "dtype": DTYPES,
    "cache_format": CACHE_FORMATS,
    "device": ("auto", "cpu", "cuda"),
    "kernels": ("auto", "reference"),
    "load_format": ("auto", "dummy"),
    "policy": ("fcfs", "priority"),
    "speculative_acceptance": ACCEPTANCES,
    "speculative_depth": DEPTHS,
}
HELP = {
    "model": "local folder or hub id (default: the bundled demo model)",
    "served_model_name": "name the API shows (default: --model)",
    "dtype": "of activations and of weights that are not FP8; auto: bfloat16 on CUDA, float32 on a CPU",
    "cache_format": "latent cache; auto: fp8 where the model and the device allow it",
    "device": "auto: CUDA if there is one",
    "kernels": "reference: plain torch operations, also on a CUDA device",
    "load_format": "dummy: random weights from config.json alone",
    "max_model_len": "longest prompt plus output in tokens (0: the model's own limit)",
    "num_cache_blocks": "cache blocks of 64 tokens per replica (0: as many as memory allows)",
    "cache_memory_bytes": "bytes of cache per rank (0: from --memory-fraction; on a CPU 1 GiB)",
    "memory_fraction": "part of the free device memory that may be used",
    "prefix_cache": "share the cache of equal prompt beginnings",
    "cuda_graphs": "replay captured graphs for decode steps",
    "fast_start": "capture few of them before serving, the others in idle moments and between steps",
    "fp8_dispatch": "send rows to FP8 experts of other ranks as those quantize them: half the bytes, the same results",
    "async_scheduling": "prepare the next step while one runs",
    "num_speculative_tokens": "draft tokens per step from the model's MTP layer (0: off)",
    "speculative_acceptance": "exact: the tokens are those without speculation; ratio: the same distribution, more drafts accepted",
    "speculative_depth": "adaptive: no drafts at sizes of batches where they measure slower; auto: adaptive under exact acceptance",
    "simulate_world": "dp=N,tp=N,ep=N: time one rank of that deployment alone, with --load-format dummy; tokens mean nothing",
    "seed": "of requests that bring none",
    "fidelity_fraction": "part of the steps in which attention is compared with exact attention, per layer (0: off)",
    "dp": "data-parallel replicas of attention and cache",
    "tp": "ranks that share a replica's heads; experts lie over all dp * tp ranks",
    "max_num_batched_tokens": "query tokens of one step of a replica",
    "max_num_seqs": "sequences a replica runs at once",
    "prefill_chunk": "most prompt tokens of one sequence in a step (0: the whole budget)",
    "max_queued_requests": "waiting requests of a replica beyond which new ones get 503 (0: no limit)",
    "policy": "order of waiting requests",
    "max_skips": "how often a waiting request may be overtaken by smaller ones that fit",
    "speculative_max_batch": "no drafts while more sequences than this run at once (0: always draft)",
    "host": "address to listen on",
    "port": "port to listen on (0: a free one, printed)",
    "api_keys": "key that clients must send as a bearer token; may be given several times; also read from SNAPMLA_API_KEY",
    "chat_template": "file with a Jinja chat template in place of the model's",
    "tool_call_parser": "format of tool calls: auto (from the model), none, or its name",
    "reasoning_parser": "format of reasoning: auto (from the model), none, or its name",
    "max_body_bytes": "larger request bodies get 413",
    "max_header_bytes": "larger request headers get 431",
    "drain_s": "seconds that open requests get to finish after SIGTERM",
    "heartbeat_s": "seconds of silence after which a rank counts as dead",
    "stall_s": "seconds without a finished step after which a busy engine counts as dead",
    "access_log": "one JSON line per finished request on standard output",
}
_FLAG = {"api_keys": "--api-key"}


def _fields(kind: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind) if not dataclasses.is_dataclass(hints[field.name])]


def _add(parser: argparse.ArgumentParser, title: str, kind: type) -> None:
    group = parser.add_argument_group(title)
    for field, hint in _fields(kind):
        flag = _FLAG.get(field.name, "--" + field.name.replace("_", "-"))
        default = DEMO_MODEL if field.name == "model" else field.default
        options: dict[str, Any] = {"dest": field.name, "default": default, "help": HELP[field.name]}
        if default not in ("", (), DEMO_MODEL):
            options["help"] += f" (default: {default})"
        if hint is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif hint == tuple[str, ...]:
            options |= {"action": "append", "default": None, "metavar": "KEY"}
        elif field.name in CHOICES:
            options["choices"] = CHOICES[field.name]
        else:
            options |= {"type": hint, "metavar": {int: "N", float: "X", str: "TEXT"}[hint]}
        group.add_argument(flag, **options)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of EngineConfig, ParallelConfig and SchedulerConfig."""
    _add(parser, "engine", EngineConfig)
    _add(parser, "parallel", ParallelConfig)
    _add(parser, "scheduler", SchedulerConfig)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of ServerConfig."""
    _add(parser, "server", ServerConfig)


def _take(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field, _ in _fields(kind)}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError naming the field that cannot work."""
    return EngineConfig(
        **_take(args, EngineConfig),
        parallel=ParallelConfig(**_take(args, ParallelConfig)),
        scheduler=SchedulerConfig(**_take(args, SchedulerConfig)),
    )


def server_config(args: argparse.Namespace, environment_key: str | None = None) -> ServerConfig:
    """environment_key: an API key from the environment, which unlike a flag is not visible in the process list."""
    values = _take(args, ServerConfig)
    values["api_keys"] = tuple(values["api_keys"] or ()) + ((environment_key,) if environment_key else ())
    if values["chat_template"] and not Path(values["chat_template"]).is_file():
        raise ConfigError(f"chat_template: {values['chat_template']} is no file")
    return ServerConfig(**values)
