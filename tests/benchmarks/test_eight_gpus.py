"""What the eight-GPU script does without GPUs; the whole script runs as `python -m benchmarks.eight_gpus --device cpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import eight_gpus
from benchmarks.workloads import SHAPES
from models.config import load_model_config


def decode_line(simulated: bool, step_us: float, context: int = 16384) -> dict[str, object]:
    return {
        "figure": "decode", "shape": "s", "dp": 8, "tp": 1, "format": "fp8", "context": context, "kind": "equal largest", "batch": 4,
        "simulated": simulated, "step_us": step_us, "tokens_per_s_per_gpu": 4e6 / step_us, "collectives_share": 0.1,
    }  # fmt: skip


def test_a_real_case_meets_its_own_simulation(tmp_path: Path) -> None:
    """Newest lines count, and a case that ran on one side only makes no pair."""
    lines = [decode_line(False, 30.0), decode_line(True, 99.0), decode_line(True, 24.0), decode_line(True, 50.0, context=32768)]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (pair,) = eight_gpus.pairs(path)
    assert pair["context"] == 16384 and (pair["step_us"], pair["simulated_step_us"]) == (30.0, 24.0)
    assert pair["prediction_error"] == pytest.approx(-0.2)


@pytest.mark.parametrize(("name", "layers"), [("deepseek_v3.1", 30), ("longcat_flash", 14)])
def test_four_ranks_take_half_the_layers(tmp_path: Path, name: str, layers: int) -> None:
    """A rank then holds what one of eight holds of the whole model, and the name says what was cut."""
    assert eight_gpus.shape_for(name, 8, tmp_path) == SHAPES / name
    cut = eight_gpus.shape_for(name, 4, tmp_path)
    assert cut.name == f"{name}-{layers}layers"
    assert load_model_config(cut).num_decoder_layers == layers


def test_multicast_must_stay_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(eight_gpus.MULTICAST, "1")
    with pytest.raises(SystemExit):
        eight_gpus.main(["--device", "cpu"])
    assert "must stay off" in capsys.readouterr().err
