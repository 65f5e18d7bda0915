"""Checks before weights are read: each fault is named with its fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, ParallelConfig
from engine.errors import ConfigError
from engine.hub import resolve_model
from engine.preflight import check_all_reduce, check_checkpoint, check_memory, choose_device


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint to break."""
    copy = tmp_path / "model"
    shutil.copytree(resolve_model("demo"), copy)
    return copy


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_whole_checkpoint_passes(folder: Path) -> None:
    size = check_checkpoint(folder)
    assert size == sum(path.stat().st_size for path in shards(folder))
    check_memory(torch.device("cpu"), size, EngineConfig("demo"))
    check_all_reduce(torch.device("cpu"))


def test_cut_missing_and_foreign_files_are_named(folder: Path) -> None:
    """Report D19: a broken download is found in milliseconds and by name, not by a rank that never becomes ready."""
    first, *_ = shards(folder)
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"{first.name}.*bytes.*download it again"):
        check_checkpoint(folder)
    for junk in (b"", b"\x01", b"\xff" * 64, (5).to_bytes(8, "little") + b"{junk"):
        first.write_bytes(junk)
        with pytest.raises(ConfigError, match="no safetensors file"):
            check_checkpoint(folder)
    first.unlink()
    with pytest.raises(ConfigError, match=rf"{first.name} is missing"):
        check_checkpoint(folder)


def test_without_weights(folder: Path) -> None:
    for path in [*shards(folder), folder / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(ConfigError, match="--load-format dummy"):
        check_checkpoint(folder)


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs at least .* GiB on each of 2 ranks.*use more ranks"):
        check_memory(torch.device("cpu"), 1 << 50, EngineConfig("demo", parallel=ParallelConfig(2, 1)))


def test_devices() -> None:
    threads = torch.get_num_threads()
    try:
        assert choose_device("cpu", 0, 1).type == "cpu"
    finally:
        torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device cpu"):
            choose_device("cuda", 0, 1)
    else:
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
            choose_device("cuda", 0, torch.cuda.device_count() + 1)


def test_index_decides_what_is_read(folder: Path) -> None:
    """Files beside the index (a consolidated copy, say) are not counted."""
    (folder / "extra.safetensors").write_bytes(b"\0" * 1000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    listed = {folder / name for name in index["weight_map"].values()}
    assert check_checkpoint(folder) == sum(path.stat().st_size for path in listed)
