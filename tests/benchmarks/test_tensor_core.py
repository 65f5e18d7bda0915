"""The emulated FP8 tensor core: the probed rule itself, and what it does to long sums."""

from __future__ import annotations

import torch

from benchmarks.activations import synthetic
from benchmarks.numerics import accumulation
from benchmarks.tensor_core import STEP, add_products


def one_step(acc: float, products: list[float]) -> float:
    p = torch.zeros(1, STEP)
    p[0, : len(products)] = torch.tensor(products)
    return float(add_products(torch.tensor([[acc]]), p, torch.ones(STEP, 1)))


def test_terms_below_two_to_minus_13_of_the_largest_are_lost() -> None:
    quantum = 256 * 2**-13
    assert one_step(256.0, [quantum]) == 256.0 + quantum
    assert one_step(256.0, [quantum * 0.96875]) == 256.0
    assert one_step(0.0, [256.0, -quantum * 0.5]) == 256.0


def test_each_term_is_cut_on_its_own_toward_zero() -> None:
    assert one_step(1.0, [2.0**-14] * 32) == 1.0
    assert one_step(-1.0, [-(2.0**-14)] * 32) == -1.0
    assert one_step(1.0 + 2.0**-14, [0.0]) == 1.0  # the accumulator too, even beside zeros


def test_small_sums_are_exact() -> None:
    assert one_step(3.0, [0.5, -1.25, 4.0]) == 6.25


def test_sums_in_place_decay_with_context_and_folded_sums_do_not() -> None:
    longest = synthetic(8192, 300.0, mean=0.5, heads=4, queries=8)
    alone = {}
    for tokens in (1024, 8192):
        lines = {line["sums"]: line for line in accumulation(longest.beginning(tokens, 8))}
        alone[tokens] = {name: lines[name]["alone"][0] for name in ("single-level", "two-level, 64", "two-level, 128")}
        assert lines["single-level"]["shrink"] < lines["two-level, 64"]["shrink"]  # truncation biases toward zero
    assert alone[8192]["single-level"] > 3 * alone[1024]["single-level"]
    for name in ("two-level, 64", "two-level, 128"):
        assert alone[8192][name] < 1.2 * alone[1024][name] < 2e-3
