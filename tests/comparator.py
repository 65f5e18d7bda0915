"""The one meaning of "same tokens" in all equality tests.

FP32 weights with the exact cache: all tokens are equal. With BF16 or FP8 anywhere, rounding may flip a near-tie, so two
runs are the same up to the first position whose reference gap between the two best logits is below the measured noise
of that configuration; and under teacher forcing their logits differ by no more than that noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

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


@dataclass
class Generation:
    """A greedy continuation. logprobs: per position, log probability of the chosen token and of the best ones, by token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)

    def gaps(self) -> list[float]:
        best = [sorted(entry.values(), reverse=True)[:2] for entry in self.logprobs]
        return [first - second for first, second in best]


@dataclass(frozen=True)
class Differences:
    """Of log probabilities, in nats, at positions whose contexts are equal: the noise of a pair of configurations."""

    median: float
    p99: float
    largest: float
    positions: int

    @staticmethod
    def between(got: Sequence[Generation], want: Sequence[Generation]) -> Differences:
        values = []
        for mine, theirs in zip(got, want, strict=True):
            for position, (a, b) in enumerate(zip(mine.logprobs, theirs.logprobs)):
                values.append(max(abs(a[token] - b[token]) for token in a.keys() & b.keys()) if a.keys() & b.keys() else 0.0)
                if mine.token_ids[position] != theirs.token_ids[position]:
                    break
        cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [max(values, default=0.0)] * 99
        return Differences(cuts[49], cuts[98], max(values, default=0.0), len(values))


_SMALLEST_NOISE = 1e-3  # nats: two configurations that happen to agree bit by bit do not make a control


def assert_same_generations(
    got: Sequence[Generation], want: Sequence[Generation], noise: Differences, label: str = ""
) -> tuple[Differences, int]:
    """Check that `got` are the tokens of `want` up to rounding; returns their differences and how many tokens were equal.

    noise: measured between two configurations that differ by rounding alone (other activation dtype, other batch sizes).
    The pair's own differences may be twice as large, at the 99th percentile and at most (the median says nothing: kernels
    that happen to be the same make it zero); a token may differ where the reference's two best are closer than twice the
    largest noise, and the rest of that continuation is not compared.
    Raises AssertionError with the figures of both.
    """
    found = Differences.between(got, want)
    for name in ("p99", "largest"):
        allowed = 2 * max(getattr(noise, name), _SMALLEST_NOISE)
        assert getattr(found, name) <= allowed, f"{label}{name} of {found}, allowed {allowed:.4f} by {noise}"
    equal = 0
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        limit = max(noise.largest, _SMALLEST_NOISE)
        name = f"{label}prompt {number}: "
        equal += assert_same_tokens(mine.token_ids, theirs.token_ids, gaps=theirs.gaps(), noise=limit, label=name)
    return found, equal
