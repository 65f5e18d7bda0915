"""The one meaning of "same tokens" in all equality tests.

FP32 weights with the exact cache: all tokens are equal. With BF16 or FP8 anywhere, rounding may flip a near-tie, so two
runs are the same up to the first position whose reference gap between the two best logits is below the measured noise
of that configuration; and under teacher forcing their logits differ by no more than that noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def assert_same_tokens(
    got: Sequence[int],
    want: Sequence[int],
    *,
    gaps: Sequence[float] | None = None,
    noise: float = 0.0,
    label: str = "",
) -> int:
    """Check `got` against the reference tokens `want`; returns how many leading tokens were compared and equal.

    gaps: the reference's top-1 minus top-2 logit (or log probability) at each position; needed when noise > 0
    noise: the largest logit difference between the two configurations, measured by the caller; 0 demands equality
    Raises AssertionError at the first difference that noise does not explain, or when the lengths differ without one.
    """
    for position, (a, b) in enumerate(zip(got, want)):
        if a == b:
            continue
        if noise > 0.0:
            assert gaps is not None, "noise without the reference's top-2 gaps"
            # Each of the two logits may move by `noise`, so a gap up to twice that can flip.
            if gaps[position] <= 2 * noise:
                return position
        gap = f", reference gap {gaps[position]:.3g}, noise {noise:.3g}" if gaps is not None else ""
        raise AssertionError(f"{label}token {position} is {a}, expected {b}{gap}; got {list(got)}, expected {list(want)}")
    assert len(got) == len(want), f"{label}{len(got)} tokens, expected {len(want)}"
    return len(want)


def top2_gaps(logits: torch.Tensor) -> list[float]:
    """Gap between the two largest entries of each row of logits [T, V]."""
    top = logits.float().topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).tolist()


def assert_logits_within(got: torch.Tensor, want: torch.Tensor, noise: float, label: str = "") -> float:
    """Check that teacher-forced logits [T, V] differ by at most `noise`; returns the largest difference."""
    assert got.shape == want.shape, f"{label}logits {tuple(got.shape)}, expected {tuple(want.shape)}"
    worst = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    assert worst <= noise, f"{label}logits differ by {worst:.4g}, allowed {noise:.4g}"
    return worst
