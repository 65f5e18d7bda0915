"""The GPU figures' cases and the probe's timing, on a CPU with the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kernel_figures
from benchmarks.kernel_figures import ProbeCase
from benchmarks.records import Records, read
from kernels.layout import CacheFormat
from models.config import load_model_config


def test_every_head_count_and_query_length_is_timed() -> None:
    """Quick runs leave out lengths, never a head count, a query length or a deployment."""
    for quick in (True, False):
        cases = kernel_figures.timing_cases(quick, ["fig6", "fig7"])
        seven = [case for case in cases if case["figure"] == "fig7"]
        assert {(case["heads"], case["query_len"]) for case in seven} == {
            (h, q) for h in (16, 32, 64, 128) for q in (1, 2, 3, 4)
        }
        six = [case for case in cases if case["figure"] == "fig6"]
        assert {(case["model"], case["dp"], case["tp"]) for case in six} == {
            (model, dp, tp) for model in kernel_figures.MODELS for dp, tp in kernel_figures.SETTINGS
        }
        assert min(case["heads"] for case in six) == 8  # LongCat-Flash at TP8
        assert max(case["length"] for case in seven) == max(case["length"] for case in six) == 131072


def test_batches_of_fig6_fill_a_rank_in_bf16() -> None:
    for _, layers in kernel_figures.MODELS.values():
        batch = kernel_figures.batch_that_fits(layers, 32768)
        taken = batch * 32768 * layers * CacheFormat.BF16.bytes_per_token(512, 64)
        assert taken <= kernel_figures.CACHE_BYTES < 2 * taken


@pytest.mark.usefixtures("one_thread")
def test_engines_of_the_probe_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the engine with a fraction that matters compares; here one of 10 steps, so that a few do."""
    monkeypatch.setattr(kernel_figures, "PROBE_FRACTIONS", {"off": 0.0, "writing": 1e-9, "on": 0.1})
    path = tmp_path / "lines.jsonl"
    kernel_figures.probe(Records(path, device="cpu", method="m", seed=0), ProbeCase("demo", 0, 1, (1, 1)), 2, "cpu", 12)
    (line,) = read(path)
    assert line["fidelity_steps"] >= 1 and max(line["fidelity_mean"]) < 0.1
    assert set(line["ms"]) == {"off", "writing", "on"} and all(len(times) == 2 for times in line["ms"].values())
    ratios = [on / off - 1 for on, off in zip(line["ms"]["on"], line["ms"]["off"])]
    assert line["overhead_turns"] == ratios and line["overhead"] == pytest.approx(sum(ratios) / 2)


def test_shapes_are_cut_to_fit_three_engines(tmp_path: Path) -> None:
    model, options = kernel_figures.PROBE_CASES[0].engine(tmp_path)
    assert load_model_config(Path(model)).num_decoder_layers == 8
    assert options["simulate_world"] and options["load_format"] == "dummy"
