"""Whether drafts pay is found by timing both ways: on a simulated device whose step times are known."""

from __future__ import annotations

import logging

import pytest

from engine.draft_depth import DraftDepth


class Device:
    """Steps of `num_sequences` with drafts take `slower` times as long, and bring `tokens` tokens of a sequence."""

    def __init__(self, depth: DraftDepth, slower: float, tokens: float, jitter: float = 0.0) -> None:
        self.depth, self.slower, self.tokens, self.jitter = depth, slower, tokens, jitter
        self.now = 0.0
        self.drafting = False

    def run(self, num_sequences: int, steps: int) -> float:
        """Part of the steps that had drafts."""
        drafted = 0
        for step in range(steps):
            self.now += (self.slower if self.drafting else 1.0) * (1 + self.jitter * (-1) ** step)
            tokens = num_sequences * (self.tokens if self.drafting else 1)
            self.depth.observe(num_sequences, self.drafting, round(tokens), self.now)
            drafted += self.drafting
            self.drafting = self.depth.choose(num_sequences) > 0
        return drafted / steps


def test_drafts_stay_where_they_pay_and_go_where_they_do_not(caplog: pytest.LogCaptureFixture) -> None:
    """Small batches gain, large ones do not: each class of sizes has its own answer, and says so once."""
    device = Device(DraftDepth(3, adaptive=True, max_batch=0), slower=1.4, tokens=2.5)
    with caplog.at_level(logging.INFO, logger="engine.draft_depth"):
        device.run(4, 100)
        assert device.run(4, 900) > 0.98
        device.slower = 2.8
        device.run(64, 100)
        assert device.run(64, 900) < 0.02
        device.slower = 1.4
        assert device.run(3, 100) > 0.85
    assert [("pay" in r.message, "do not" in r.message) for r in caplog.records] == [(True, False), (True, True)]
    assert "3 to 4 sequences: 3 drafts pay: 2.50 tokens of a sequence in 1400.00 ms with them, 1 in 1000.00 ms" in caplog.text


def test_a_changed_text_is_noticed() -> None:
    """What lost is timed again: drafts come back when they are accepted, and go when they are not, at a small cost."""
    device = Device(DraftDepth(1, adaptive=True, max_batch=0), slower=1.5, tokens=1.2)
    device.run(8, 200)
    assert device.run(8, 4000) < 0.02
    device.tokens = 1.9
    device.run(8, 2500)
    assert device.run(8, 4000) > 0.98
    device.tokens = 1.2
    device.run(8, 2500)
    assert device.run(8, 4000) < 0.02


def test_noise_does_not_toggle() -> None:
    """A near-tie under noise keeps what it found first."""
    device = Device(DraftDepth(1, adaptive=True, max_batch=0), slower=1.5, tokens=1.51, jitter=0.3)
    device.run(2, 200)
    first = device.run(2, 500)
    assert first < 0.02 or first > 0.98
    for _ in range(10):
        assert abs(device.run(2, 2000) - round(first)) < 0.03


def test_pauses_and_prompts_are_not_timed() -> None:
    depth = DraftDepth(2, adaptive=True, max_batch=0)
    device = Device(depth, slower=1.2, tokens=2.0)
    for _ in range(400):
        device.run(1, 3)
        device.now += 50 * device.drafting  # a pause after every third step with drafts
        depth.interrupt()
    assert device.run(1, 200) > 0.9


def test_fixed_depth_and_the_largest_batch() -> None:
    fixed = Device(DraftDepth(2, adaptive=False, max_batch=16), slower=9.0, tokens=1.0)
    assert fixed.run(16, 100) == 0.99
    assert fixed.run(17, 100) == 0.01
