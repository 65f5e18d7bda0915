"""Checks before weights are read: devices, memory, checkpoint files, and one all-reduce. Each failure names its fix."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.errors import ConfigError

_LARGEST_HEADER_BYTES = 256 << 20


def takes_cpu(wanted: str) -> bool:
    """auto is CUDA if there is a device. Raises ConfigError where cuda is asked for and is not here."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda is not available here (no device, or a build of torch without CUDA); use device cpu (--device cpu)"
        )
    return wanted == "cpu" or not torch.cuda.is_available()


def choose_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    """The device of this rank, made current. Raises ConfigError when the host has too few."""
    if takes_cpu(wanted):
        cores = len(os.sched_getaffinity(0)) - 1  # one is the front end's: tokens must leave while the next are computed
        torch.set_num_threads(max(1, cores // local_world_size))
        return torch.device("cpu")
    if torch.cuda.device_count() < local_world_size:
        raise ConfigError(
            f"{local_world_size} ranks on this host need as many GPUs, but only {torch.cuda.device_count()} are visible; "
            "lower --dp or --tp, use more nodes, or check CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_checkpoint(folder: Path) -> int:
    """Bytes of the checkpoint's safetensors files; each must be there and as long as its own header says."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ConfigError(f"model: {folder} holds no .safetensors file; --load-format dummy makes random weights")
    total = 0
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ConfigError(f"model: {path} is missing (the index lists it); download it again")
        size, expected = path.stat().st_size, _length_by_header(path)
        if size != expected:
            raise ConfigError(f"model: {path} has {size} bytes, its header says {expected}; download it again")
        total += size
    return total


def _length_by_header(path: Path) -> int:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= _LARGEST_HEADER_BYTES:
            raise ConfigError(f"model: {path} is no safetensors file")
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise ConfigError(f"model: {path} is no safetensors file: {error}") from error
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + header_bytes + max(ends, default=0)


def check_memory(device: torch.device, checkpoint_bytes: int, config: EngineConfig) -> None:
    """Refuse what cannot fit: a rank holds at least its share of the experts, so 1 / world size of the files."""
    share = checkpoint_bytes // config.parallel.world_size
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable, what = int(free - total * (1 - config.memory_fraction)), "device memory within --memory-fraction"
    else:
        usable = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        what = "free memory"
    if share > usable:
        raise ConfigError(
            f"the checkpoint needs at least {share / 2**30:.1f} GiB on each of {config.parallel.world_size} ranks, but "
            f"{device} has {max(0, usable) / 2**30:.1f} GiB of {what}; use more ranks or free memory"
        )


def check_all_reduce(device: torch.device) -> None:
    """Every rank adds one; all must see the world size."""
    if not dist.is_initialized():
        return
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones)
    if not bool((ones == dist.get_world_size()).all()):
        raise ConfigError(f"an all-reduce over {dist.get_world_size()} ranks gave {ones[0].item()}; check the interconnect")
