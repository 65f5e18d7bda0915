"""The decode benchmark's code path on a CPU with a tiny model, and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import decode, step_parts
from benchmarks.records import read
from benchmarks.workloads import SHAPES, tiny_shape

CACHE_BYTES = 4 << 20


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_shape(tmp_path)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tiny model's operations are so short that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_dry_run_writes_every_case_once(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "decode.jsonl"
    arguments = [
        "--shapes",
        str(tiny),
        "--worlds",
        "dp=2,tp=2,ep=4",
        "--contexts",
        "256",
        "512",
        "--batches",
        "2",
        "--most",
        "5",
    ]
    arguments += ["--device", "cpu", "--cache-memory-bytes", str(CACHE_BYTES), "--output", str(output)]
    decode.main(arguments)
    lines = read(output)
    assert {(line["format"], line["context"], line["kind"]) for line in lines} >= {
        (fmt, context, kind) for fmt in ("fp8", "bf16") for context in (256, 512) for kind in ("given", "equal")
    }
    printed = capsys.readouterr()
    assert "SIMULATED rank of tiny" in printed.out and "SIMULATION" in printed.err
    for line in lines:
        assert line["simulated"] is True and (line["dp"], line["tp"]) == (2, 2)
        parts = line["parts"]
        assert set(parts) == {"attention", "linears", "experts", "norms", "collectives", "sampling"}
        assert line["roofline_us"] == pytest.approx(sum(part["roofline_us"] for part in parts.values()))
        assert line["tokens_per_s_per_gpu"] == pytest.approx(1e6 * line["batch"] / 2 / line["step_us"])
        # 2 layers; a sequence has grown by the first step and the recorded one
        tokens = line["batch"] * (line["context"] - decode.HEADROOM + 2)
        assert parts["attention"]["flops"] == 2 * 2 * 4 * tokens * (576 + 512)  # layers, multiply and add, local heads
        per_token = 644 if line["format"] == "fp8" else 1152
        assert 2 * tokens * per_token < parts["attention"]["bytes"] < 1.5 * 2 * tokens * per_token
        rows = -(-line["batch"] // 2)  # in the one MoE layer each of the tp ranks routes its share
        assert parts["experts"]["flops"] == 2 * rows * 8 * 3 * 64 * 64 + 2 * rows * 64 * 16
    decode.main(arguments)
    assert len(read(output)) == len(lines), "a second run finds its cases done"


def test_largest_batch_fills_the_cache(tiny: Path) -> None:
    """Equal bytes hold 1152 / 644 times the sequences in FP8."""
    rank = decode.Rank(decode.engine_config(tiny, "dp=2,tp=1", real=False), torch.device("cpu"), CACHE_BYTES)
    kinds = {(case.fmt.value, case.kind): case.batch for case in rank.cases([512], [2], 100)}
    assert kinds["fp8", "equal"] == kinds["bf16", "equal"] == (CACHE_BYTES // (64 * 2 * 1152) - 1) // 8
    assert kinds["fp8", "largest"] == (CACHE_BYTES // (64 * 2 * 644) - 1) // 8
    assert ("bf16", "largest") not in kinds


def test_overlapping_kernels_count_once() -> None:
    assert step_parts.covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert step_parts.covered([]) == 0


def test_every_shape_has_a_deployment() -> None:
    assert set(decode.WORLDS) == {folder.name for folder in SHAPES.iterdir()}
