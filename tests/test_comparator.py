"""The comparator itself must be able to fail."""

from __future__ import annotations

import pytest
import torch

from tests.comparator import (
    Differences,
    Generation,
    assert_logits_within,
    assert_same_generations,
    assert_same_tokens,
    top2_gaps,
)


def test_exact_equality_is_demanded_without_noise() -> None:
    assert assert_same_tokens([1, 2, 3], [1, 2, 3]) == 3
    with pytest.raises(AssertionError, match="token 1 is 9"):
        assert_same_tokens([1, 9, 3], [1, 2, 3], gaps=[1.0, 0.0, 1.0])


def test_noise_excuses_only_a_near_tie() -> None:
    assert assert_same_tokens([1, 9, 3], [1, 2, 3], gaps=[5.0, 0.1, 5.0], noise=0.06) == 1
    with pytest.raises(AssertionError, match=r"reference gap 0\.2"):
        assert_same_tokens([1, 9, 3], [1, 2, 3], gaps=[5.0, 0.2, 5.0], noise=0.06)


def test_a_missing_token_is_a_difference() -> None:
    with pytest.raises(AssertionError, match="2 tokens, expected 3"):
        assert_same_tokens([1, 2], [1, 2, 3])


def test_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert top2_gaps(logits) == [2.0]
    assert assert_logits_within(logits + 0.01, logits, 0.02) > 0
    with pytest.raises(AssertionError, match="differ by"):
        assert_logits_within(logits + 0.1, logits, 0.02)


WANT = [Generation([5, 6, 7], [{5: -0.1, 9: -2.5}, {6: -0.5, 8: -0.6}, {7: -0.2, 1: -3.0}])]
NOISE = Differences(median=0.0, p99=0.07, largest=0.06, positions=100)


def test_generations_may_differ_by_the_measured_noise() -> None:
    near = [Generation([5, 8, 2], [{5: -0.12, 9: -2.5}, {8: -0.54, 6: -0.55}, {2: -0.1, 3: -4.0}])]
    found, equal = assert_same_generations(near, WANT, NOISE)
    assert equal == 1 and found.positions == 2 and found.largest == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([Generation([5, 6, 7], [{5: -0.1}, {6: -0.5}, {7: -0.4}])], "p99 of"),
        ([Generation([5, 6, 7], [{5: -0.1}, {6: -0.5}, {7: -0.33}])], "largest of"),
        ([Generation([9, 6, 7], [{5: -0.1, 9: -2.5}, {6: -0.5}, {7: -0.2}])], "prompt 0: token 0 is 9"),
        ([Generation([5, 6], [{5: -0.1}, {6: -0.5}])], "2 tokens, expected 3"),
    ],
)
def test_generations_beyond_the_noise_fail(got: list[Generation], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_generations(got, WANT, NOISE)
