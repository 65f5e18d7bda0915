"""How query rows map to tiles and CTAs, and prompts to passes over the experts: functions of sizes, which need no device."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kernels.cuda import moe
from kernels.cuda.build import MODULES
from kernels.cuda.mla_decode import FP8_BUILDS, MAX_GROUP, TILE_ROWS, Geometry


@pytest.mark.parametrize("sm_count", [114, 132])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_row_has_a_tile_and_every_group_fits_the_device(sm_count: int, invariant: bool) -> None:
    for heads in range(1, 129):
        for query_len in range(1, 5):
            g = Geometry(3, query_len, heads, sm_count, invariant)
            assert g.units * g.group * TILE_ROWS >= query_len * heads > (g.tiles - 1) * TILE_ROWS
            assert 1 <= g.group <= MAX_GROUP and g.units * g.group - g.tiles < g.group
            assert g.groups * g.group <= sm_count < (g.groups + 1) * g.group


def test_workspace_is_bounded_whatever_the_batch() -> None:
    """Balanced plans leave at most two partial tiles a CTA: 264 tiles of 131 KB on an H200."""
    for batch in (1, 32, 512):
        g = Geometry(batch, 1, 128, 132, False)
        assert g.max_slots * g.group == 264
    assert Geometry(4, 1, 64, 132, True).max_slots == 4 * 8


def test_common_shapes() -> None:
    one, two, four = (Geometry(32, s, h, 132, False) for s, h in ((1, 16), (1, 128), (2, 128)))
    assert (one.tiles, one.groups) == (1, 132)
    assert (two.tiles, two.group, two.groups) == (2, 2, 66)
    assert (four.tiles, four.group, four.groups) == (4, 4, 33)


def test_builds_of_the_fp8_kernel_have_the_rows_they_are_chosen_for() -> None:
    assert list(FP8_BUILDS) == sorted(FP8_BUILDS) and max(FP8_BUILDS) == TILE_ROWS
    for rows, module in FP8_BUILDS.items():
        assert dict(MODULES[module].defines).get("TILE_N", TILE_ROWS) == rows


def test_passes_over_the_experts_take_every_part_once_within_their_room() -> None:
    """Report N12: all tokens of 128 parts to one rank, a fair share, none, and shares that differ."""
    for totals in ([4096] * 128, [512] * 128, [0] * 128, [7], [3, 4096, 0, 4000, 100, 4096]):
        found = moe.passes(totals, 8192)
        assert [first for first, _, _ in found] == [0, *(end for _, end, _ in found[:-1])] and found[-1][1] == len(totals)
        for first, end, pairs in found:
            assert pairs == sum(totals[first:end]) <= 8192
        assert all(sum(totals[a[0] : b[1]]) > 8192 for a, b in pairwise(found)), "two passes that fit into one"
