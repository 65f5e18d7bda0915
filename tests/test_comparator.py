"""The comparator itself must be able to fail."""

from __future__ import annotations

import pytest
import torch

from tests.comparator import assert_logits_within, assert_same_tokens, top2_gaps


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
