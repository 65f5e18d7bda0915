"""What the eight-GPU script does without GPUs; the whole script runs as `python -m benchmarks.eight_gpus --device cpu`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import deployments, eight_gpus, several_gpus
from benchmarks.workloads import SHAPES
from models.config import load_model_config


def decode_line(simulated: bool, step_us: float, context: int = 16384) -> dict[str, object]:
    return {
        "figure": "decode", "shape": "s", "dp": 8, "tp": 1, "format": "fp8", "context": context, "kind": "equal largest", "batch": 4,
        "simulated": simulated, "step_us": step_us, "tokens_per_s_per_gpu": 4e6 / step_us, "collectives_share": 0.1,
        "parts": {"experts": {"us": step_us / 2}},
    }  # fmt: skip


def test_a_real_case_meets_its_own_simulation(tmp_path: Path) -> None:
    """Newest lines count, and a case that ran on one side only makes no pair."""
    lines = [decode_line(False, 30.0), decode_line(True, 99.0), decode_line(True, 24.0), decode_line(True, 50.0, context=32768)]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (pair,) = deployments.pairs(path)
    assert pair["context"] == 16384 and (pair["step_us"], pair["simulated_step_us"]) == (30.0, 24.0)
    assert pair["prediction_error"] == pytest.approx(-0.2)


@pytest.mark.parametrize(("name", "layers"), [("deepseek_v3.1", 30), ("longcat_flash", 14)])
def test_four_ranks_take_half_the_layers(tmp_path: Path, name: str, layers: int) -> None:
    """A rank then holds what one of eight holds of the whole model, and the name says what was cut."""
    assert deployments.shape_for(name, 8, tmp_path) == SHAPES / name
    cut = deployments.shape_for(name, 4, tmp_path)
    assert cut.name == f"{name}-{layers}layers"
    assert load_model_config(cut).num_decoder_layers == layers


class Ranks:
    """In place of a Run whose ranks end at the second case. runs: how often they were started."""

    def __init__(self, folder: Path, remembered: bool) -> None:
        self.run = several_gpus.Run(8, "cpu", several_gpus.Sizes.tiny(), folder)
        self.deployment = deployments.Deployment(self.run, Path("s"), 8, 1)
        self.remembered, self.runs = remembered, 0
        self.run.torchrun = self.torchrun  # type: ignore[method-assign]

    def torchrun(self, name: str, *module: str) -> str:
        self.runs += 1
        if self.deployment.lines("decode_failed", simulated=False):
            return "all others measured"
        if self.remembered:
            state = {name: self.run.records.state[name] for name in ("device", "git")}
            with self.run.decode_results.open("a") as out:
                out.write(json.dumps(decode_line(False, 1.0) | state | {"figure": "decode_failed", "error": "memory"}) + "\n")
        raise RuntimeError("a rank ended")


def test_ranks_that_a_case_ended_start_again_without_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, remembered=True)
    deployments.real_ranks(ranks.deployment)
    assert ranks.runs == 2 and ranks.deployment.is_done(simulated=False) and not ranks.deployment.is_done(simulated=True)
    (line,) = ranks.run.records.find(part="ranks")
    assert line["cases_failed"] == [("fp8", 16384, 4)]
    deployments.real_ranks(ranks.deployment)
    assert ranks.runs == 2, "a deployment that is done starts no ranks"


def test_ranks_that_end_for_no_case_are_not_started_for_ever(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, remembered=False)
    with pytest.raises(RuntimeError, match="a rank ended"):
        deployments.real_ranks(ranks.deployment)
    assert ranks.runs == 1 and not ranks.deployment.is_done(simulated=False)


def test_silent_ranks_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that waits for ever says nothing; nor does a server that nobody asks."""
    monkeypatch.setattr(several_gpus, "SILENT_S", 1.0)
    run = several_gpus.Run(1, "cpu", several_gpus.Sizes.tiny(), tmp_path)
    with pytest.raises(RuntimeError, match="said nothing for 1 s"):
        run.torchrun("silent", "http.server", "0", "--bind", "127.0.0.1", environment={"PYTHONUNBUFFERED": ""})


def test_what_nccl_says_of_multicast_is_counted() -> None:
    logs = ["h:1:2 [0] NCCL INFO NCCL_NVLS_ENABLE set by environment to 0.\nh:1:2 [0] NCCL INFO Channel 00\n"] * 8
    assert eight_gpus.multicast_lines(logs) == {"NCCL_NVLS_ENABLE set by environment to #.": 8}


def test_multicast_must_stay_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(eight_gpus.MULTICAST, "1")
    with pytest.raises(SystemExit):
        eight_gpus.main(["--device", "cpu"])
    assert "must stay off" in capsys.readouterr().err
