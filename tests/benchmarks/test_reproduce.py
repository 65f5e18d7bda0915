"""Results files, the plan of measurements, and figures drawn from results alone."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import plots, reproduce
from benchmarks.figure_style import Folders
from benchmarks.plot_speed import throughput
from benchmarks.records import RESULTS, Records, bootstrap, newest, read, wilson
from benchmarks.tables import perplexity_table


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


def test_without_a_gpu_nothing_asks_for_one(tmp_path: Path) -> None:
    figures = list(plots.DRAWN)
    without, with_gpu = (reproduce.runs(figures, True, gpu, tmp_path) for gpu in (False, True))
    asks = {"benchmarks.kernel_figures", "benchmarks.decode"}
    assert not any(run.command[0] in asks or "cuda" in run.command for run in without)
    assert asks <= {run.command[0] for run in with_gpu}
    measured = {figure for run in without for figure in run.figures}
    assert measured == set(figures) - {"fig1", "fig6", "fig7", "probe", "decode_step", "decode_ratio"}
    assert {figure for run in with_gpu for figure in run.figures} == set(figures)


def test_parts_of_one_module_share_a_process(tmp_path: Path) -> None:
    (run,) = reproduce.runs(["fig3", "sources"], True, False, tmp_path)
    out = ["--out", str(tmp_path / "numerics.jsonl")]
    assert run.command == ["benchmarks.numerics", "--only", "values", "sources", "--device", "cpu", "--quick", *out]
    assert run.figures == ["fig3", "sources"]


def test_quick_run_with_a_gpu_is_planned_below_eight_minutes(tmp_path: Path) -> None:
    assert reproduce.planned(reproduce.runs(list(plots.DRAWN), True, True, tmp_path), beside=4) <= 420


def test_nothing_runs_beside_a_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """What is no timing runs first, as many at once as there is room for; a run that fails stops no other and is named."""
    running: list[bool] = []
    most = {True: 0, False: 0}
    lock = threading.Lock()

    def process(command: list[str], **kwargs: object) -> subprocess.CompletedProcess:
        timing = command[2] == "benchmarks.decode" or "fig7" in command
        with lock:
            assert not any(running) and not (timing and running)
            running.append(timing)
            most[timing] = max(most[timing], len(running))
        time.sleep(0.05)
        with lock:
            running.remove(timing)
        return subprocess.CompletedProcess(command, int("numerics" in command[2]))

    monkeypatch.setattr(reproduce.subprocess, "run", process)
    monkeypatch.setattr(reproduce, "at_once", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("sys.argv", ["reproduce", "--quick", "--folder", str(tmp_path)])
    assert reproduce.main() == 1
    assert most == {True: 1, False: 3}
    told = capsys.readouterr().out
    assert "failed: benchmarks.numerics" in told and "probe: left out, kernel_figures.jsonl has no lines" in told


def test_figures_are_drawn_from_the_results_in_the_repository(tmp_path: Path) -> None:
    assert plots.draw(["fig3", "sources", "table1", "table2"], Folders(figures=tmp_path)) == {}
    for name in ("fig3_values", "error_by_source", "table1_quality"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    assert "| SnapMLA (FP8 cache) |" in (tmp_path / "table2_lengths.md").read_text()


def test_missing_results_are_named(tmp_path: Path) -> None:
    left_out = plots.draw(list(plots.DRAWN), Folders(tmp_path, tmp_path))
    assert set(left_out) == set(plots.DRAWN)
    assert all(".jsonl" in reason for reason in left_out.values())


def decode_line(fmt: str, kind: str, rate: float, simulated: bool) -> dict[str, object]:
    return {
        "figure": "decode", "shape": "deepseek_v3.1", "dp": 8, "tp": 1, "format": fmt, "context": 16384, "kind": kind, "batch": 4,
        "simulated": simulated, "step_us": 4e6 / rate, "window_us": [3.9e6 / rate, 4e6 / rate, 4.1e6 / rate], "tokens_per_s_per_gpu": rate,
        "method": "m", "device": "d", "torch": "t", "date": "2026-01-01T00:00:00Z",
    }  # fmt: skip


def test_simulated_ranks_say_so_in_the_figure() -> None:
    """The title of a panel, the legend, and hatches, beside the bars of real ranks."""
    lines = [decode_line("fp8", "equal", 150.0, True), decode_line("bf16", "equal largest", 100.0, True)]
    figure = throughput(lines, "title")
    (axis,) = figure.axes
    assert "SIMULATED: one rank of 8" in axis.get_title()
    assert any("simulated rank" in text.get_text() for text in figure.legends[0].get_texts())
    assert all(bar.get_hatch() for bar in axis.patches)
    assert {"1.50x", "100"} <= {text.get_text() for text in axis.texts}
    (axis,) = throughput([*lines, decode_line("fp8", "equal", 140.0, False)], "title").axes
    assert "8 GPUs, and one SIMULATED rank" in axis.get_title()
    assert [bool(bar.get_hatch()) for bar in axis.patches].count(False) == 1
    (axis,) = throughput([decode_line("fp8", "equal", 140.0, False)], "title").axes
    assert "SIMULATED" not in axis.get_title()


def test_fp8_cache_keeps_perplexity_within_half_a_percent() -> None:
    """The whole 95 % interval of the recorded change; quantized RoPE is beside it in the same table."""
    table = {entry["scheme"]: entry for entry in perplexity_table(RESULTS, "cpu", "fp32")}
    assert -0.5 < table["fp8"]["low"] < table["fp8"]["high"] < 0.5
    assert {"bf16", "a", "a_own"} <= set(table)
