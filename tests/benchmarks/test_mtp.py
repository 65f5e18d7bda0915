"""The benchmark of speculation says everything that its acceptance depends on."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.mtp import acceptance
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
