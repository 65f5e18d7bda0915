"""Results files, the plan of measurements, and figures drawn from results alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import plots, reproduce
from benchmarks.records import Records, bootstrap, newest, read, wilson

pytest.importorskip("matplotlib")


def test_records_resume_and_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = Records(path, device="cpu", method="m", seed=3)
    records.write(figure="f", layer=0, value=1.0)
    with path.open("a") as out:
        out.write('{"figure": "f", "layer": 1, "val')
    again = Records(path, device="cpu", method="m", seed=3)
    assert again.has(figure="f", layer=0)
    assert not again.has(figure="f", layer=1)
    (line,) = read(path)
    assert {"device", "clocks", "python", "torch", "git", "date", "seed", "method"} <= set(line)


def test_the_newest_line_of_a_key_counts() -> None:
    lines = [{"a": 1, "v": "old"}, {"a": 2, "v": "x"}, {"a": 1, "v": "new"}]
    assert [line["v"] for line in newest(lines, "a")] == ["new", "x"]


def test_intervals() -> None:
    low, high = wilson(20, 20)
    assert 0.8 < low < 0.9 and high == pytest.approx(1.0)
    values = np.random.default_rng(0).normal(5.0, 1.0, 400)
    low, high = bootstrap(values)
    assert low < values.mean() < high and 0.15 < high - low < 0.25


def test_without_a_gpu_nothing_asks_for_one() -> None:
    figures = list(reproduce.MEASURED_BY)
    without, with_gpu = (reproduce.commands(figures, True, gpu) for gpu in (False, True))
    assert not any("kernel_figures" in command[0] or "cuda" in command for command in without)
    assert any("kernel_figures" in command[0] for command in with_gpu)
    assert reproduce.commands(["fig3"], False, True) == [["benchmarks.numerics", "--only", "values"]]


def test_figures_are_drawn_from_the_results_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "FIGURES", tmp_path)
    assert plots.draw(["fig3", "sources", "table1", "table2"]) == {}
    for name in ("fig3_values", "error_by_source", "table1_quality"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    assert "| SnapMLA (FP8 cache) |" in (tmp_path / "table2_lengths.md").read_text()


def test_missing_results_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "FIGURES", tmp_path)
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    left_out = plots.draw(list(plots.DRAWN))
    assert set(left_out) == set(plots.DRAWN)
    assert all(".jsonl" in reason for reason in left_out.values())


def test_fp8_cache_keeps_perplexity_within_half_a_percent() -> None:
    """The whole 95 % interval of the recorded change; quantized RoPE is beside it in the same table."""
    table = {entry["scheme"]: entry for entry in plots.perplexity_table("cpu", "fp32")}
    assert -0.5 < table["fp8"]["low"] < table["fp8"]["high"] < 0.5
    assert {"bf16", "a", "a_own"} <= set(table)
