"""The prefill and start-up benchmarks' code paths on a CPU with tiny models, and their arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prefill, startup
from benchmarks.records import read
from benchmarks.workloads import tiny_shape


@pytest.fixture(autouse=True)
def _one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever edits the tree while the tests run would make two runs' lines differ."""
    monkeypatch.setattr("benchmarks.records.machine_state", lambda device: {"device": device, "git": "here"})


def test_prefill_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of 64: the second attends to the first through the cache, the third to both in one piece."""
    output = tmp_path / "prefill.jsonl"
    tiny = tiny_shape(tmp_path)
    arguments = ["--models", str(tiny), "--world", "dp=2,tp=1", "--lengths", "160", "64", "--chunk", "64", "--repeats", "1"]
    arguments += ["--device", "cpu", "--output", str(output)]
    prefill.main(arguments)
    lines = read(output)
    assert [line["tokens"] for line in lines] == [64, 160]
    assert "SIMULATED rank of tiny" in capsys.readouterr().out
    layers = 2
    for line, calls in zip(lines, (1, 1 + 2 + 2), strict=True):
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["first_token_seconds"])
        operations = {operation["name"]: operation for operation in line["operations"]}
        attention = operations["prefill_attention"]
        assert attention["calls"] == layers * calls
        pairs = line["tokens"] * (line["tokens"] + 1) / 2
        assert attention["flops"] == layers * 2 * 8 * pairs * (192 + 128), "every pair of a token and one before it, once"
        assert attention["flops"] / attention["roofline_seconds"] == pytest.approx(line["bf16_matmul_rate"])
        assert operations["grouped_mlp"]["flops"] > 0 and operations["ep_reduce_scatter"]["seconds"] > 0
        assert line["roofline_seconds"] == pytest.approx(sum(o["roofline_seconds"] for o in line["operations"]))
        assert 0 < sum(o["seconds"] for o in line["operations"]) < line["timed_seconds"]
    prefill.main(arguments)
    assert len(read(output)) == 2


def test_startup_line(tmp_path: Path) -> None:
    output = tmp_path / "startup.jsonl"
    startup.main(["--model", str(tiny_shape(tmp_path)), "--world", "dp=2,tp=1", "--num-cache-blocks", "9", "--device", "cpu", "--output", str(output)])  # fmt: skip
    (line,) = read(output)
    assert line["worker_seconds"] > 0 and line["num_blocks"] == 9 and line["layers"] == 2
