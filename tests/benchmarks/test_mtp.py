"""The benchmark of speculation says everything that its acceptance depends on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import mtp_tables
from benchmarks.mtp import acceptance, speed
from benchmarks.records import Records, read


def test_acceptance_names_temperature_and_positions(tmp_path: Path) -> None:
    """Report M06: temperature, depth and the way of accepting stand beside the acceptance of every position."""
    records = Records(tmp_path / "mtp.jsonl", device="cpu", method="test", seed=11)
    acceptance(records, argparse.Namespace(models=["demo"], device="cpu", depths=[2], prompts=3, tokens=8))
    lines = read(tmp_path / "mtp.jsonl")
    keys = [(line["acceptance"], line["temperature"], line["depth"]) for line in lines]
    assert keys == [(how, temperature, 2) for how in ("exact", "ratio") for temperature in (0.0, 0.7, 1.0)]
    for line in lines:
        first, second = line["accepted_per_pos"]
        assert 1.0 >= first >= second >= 0.0
        assert (
            line["tokens_per_step"] == round(1 + first + second, 3) or abs(line["tokens_per_step"] - 1 - first - second) < 2e-3
        )
    greedy = [line["accepted_per_pos"] for line in lines if line["temperature"] == 0.0]
    assert greedy[0] == greedy[1] and greedy[0][0] > 0.3, "greedy drafts are accepted alike either way"


def test_engines_race_in_turns(tmp_path: Path) -> None:
    """Every way of speculating against the plain one on the same batch, counted by the engine."""
    records = Records(tmp_path / "mtp.jsonl", device="cpu", method="test", seed=11)
    options = argparse.Namespace(models=["demo"], device="cpu", depths=[1], batches=[2], tokens=6)
    speed(records, options)
    lines = read(tmp_path / "mtp.jsonl")
    ways = [(line["temperature"], line["acceptance"], line["depth"], line["adaptive"]) for line in lines]
    assert ways[:2] == [(0.0, "exact", 0, False), (0.0, "exact", 1, False)]
    assert ways[2:] == [(1.0, "exact", 0, False), (1.0, "exact", 1, False), (1.0, "ratio", 1, False), (1.0, "exact", 1, True)]
    plain = [line for line in lines if not line["depth"]]
    assert [(line["speed_up"], line["drafted"], line["steps"]) for line in plain] == [(1.0, 0.0, 6)] * 2
    assert lines[1]["drafted"] > 0.5 and lines[1]["steps"] < 6 and lines[1]["tokens_per_step"] > 1


def test_tables_take_the_newest_lines(tmp_path: Path) -> None:
    state = {
        "device": "H200",
        "torch": "2.11",
        "date": "2026-11-29T22:00:00Z",
        "git": "abc",
        "where": "cuda",
        "accepted_per_pos": [0.75, 0.5],
    }
    speed = state | {
        "part": "speed",
        "acceptance": "exact",
        "temperature": 0.0,
        "depth": 2,
        "tokens_per_step": 2.25,
        "speed_up": 1.5,
    }
    equal = state | {
        "part": "equality",
        "model": "demo",
        "exact": False,
        "asynchronous": True,
        "cuda_graphs": True,
        "prompts": 200,
        "tokens": 900,
    }
    lines = [
        speed | {"batch": 1, "tokens_per_s": 100.0},
        speed | {"batch": 1, "tokens_per_s": 200.0},
        speed | {"batch": 8, "tokens_per_s": 800.0, "accepted_per_pos": [0.8, 0.6]},
        speed | {"batch": 8, "tokens_per_s": 900.0, "adaptive": True, "drafted": 0.4},
        state | {"part": "acceptance", "acceptance": "ratio", "temperature": 1.0, "depth": 2, "tokens_per_step": 2.25, "prompts": 3},
        equal | {"depth": 1, "tokens_equal": 900},
        equal | {"depth": 2, "tokens_equal": 850},
        equal | {"depth": 2, "model": "other", "failed": "token 3"},
    ]  # fmt: skip
    (tmp_path / "mtp.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = (mtp_tables.speed(tmp_path) or [])[-2:]
    assert rows[0] == "| 0.0 | exact | 2 | 200 (1.50x) | 800 (1.50x) | 0.80 0.60 | 2.25 |"
    assert rows[1] == "| 0.0 | exact | 2, adaptive |  | 900 (1.50x), drafts 0.40 | 0.75 0.50 | 2.25 |"
    assert (mtp_tables.acceptance(tmp_path) or [])[-1] == "| 1.0 | 2 |  | 0.75 0.50 (2.25) |"
    rows = (mtp_tables.equality(tmp_path) or [])[-2:]
    assert rows[0] == "| demo | H200 | BF16, graphs | own | 1, 2 | 200 | 1800 | 1750 until a near-tie | 0.75 |"
    assert "**differs**" in rows[1]
    assert mtp_tables.speed(tmp_path / "nowhere") is None
