"""Blocks: states that add up after any operation, and prefixes that are found when and only when they are equal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_manager import BLOCK_SIZE, BlockManager, blocks_for
from tests.engine.host import Host, prompt, request


def fill(blocks: BlockManager, tokens: list[int], salt: str = "") -> list[int]:
    """A sequence computes its full blocks, registers and releases them. Returns the ids they had."""
    count = len(tokens) // BLOCK_SIZE
    digests: list[bytes] = []
    found = blocks.match(digests, tokens, salt, count)
    blocks.acquire(found)
    table = found + blocks.allocate(count - len(found))
    blocks.extend_digests(digests, tokens, salt, count)
    for block, digest in zip(table, digests):
        blocks.register(block, digest)
    ids = list(table)
    blocks.release(table)
    blocks.check_invariants()
    return ids


def find(blocks: BlockManager, tokens: list[int], salt: str = "") -> list[int]:
    return blocks.match([], tokens, salt, len(tokens) // BLOCK_SIZE)


def test_block_size_is_the_kernels() -> None:
    from kernels import layout

    assert layout.BLOCK_SIZE == BLOCK_SIZE


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


def test_a_prefix_is_found_as_far_as_it_is_equal() -> None:
    blocks = BlockManager(8, True)
    tokens = prompt(200)
    ids = fill(blocks, tokens)
    assert find(blocks, tokens) == ids
    assert find(blocks, tokens[:128] + [1] * 64) == ids[:2]
    assert find(blocks, [1, *tokens[1:]]) == []
    assert blocks.num_cached == 3 and blocks.num_free == 5


def test_digests_are_cryptographic_and_rooted_at_random() -> None:
    """Reports S11 and X11: the key is no Python hash that a client could collide, and no two processes share it."""
    one, other = BlockManager(4, True), BlockManager(4, True)
    digests: list[list[bytes]] = [[], [], []]
    one.extend_digests(digests[0], prompt(64), "", 1)
    one.extend_digests(digests[1], prompt(64), "", 1)
    other.extend_digests(digests[2], prompt(64), "", 1)
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0][0]) == 32
    # -1 and -2 have one Python hash, so do 2**61 - 1 and 0: tokens of equal hash must not be equal prefixes
    assert hash(-1) == hash(-2)
    colliding: list[list[bytes]] = [[], []]
    one.extend_digests(colliding[0], [-1] * 64, "", 1)
    one.extend_digests(colliding[1], [-2] * 64, "", 1)
    assert colliding[0] != colliding[1]


def test_equal_blocks_under_different_parents_differ() -> None:
    """Report S12: the key of a block covers all its ancestors, and the salt above them."""
    blocks = BlockManager(16, True)
    second = [3] * 64
    fill(blocks, [1] * 64 + second)
    assert len(find(blocks, [2] * 64 + second)) == 0
    fill(blocks, [2] * 64)
    assert len(find(blocks, [2] * 64 + second)) == 1
    fill(blocks, [1] * 64 + second, salt="tenant")
    assert len(find(blocks, [1] * 64 + second, salt="other")) == 0


def test_salt_separates_tenants() -> None:
    """Report X12: a prefix under one salt cannot be found, or timed, under another or without one."""
    blocks = BlockManager(16, True)
    ids = fill(blocks, prompt(64), salt="a")
    assert find(blocks, prompt(64), salt="a") == ids
    assert find(blocks, prompt(64), salt="b") == find(blocks, prompt(64)) == []


def test_salt_and_tokens_are_tagged() -> None:
    """Report S10: a salt whose bytes are a block's tokens does not share the key space of blocks; odd text is allowed."""
    blocks = BlockManager(16, True)
    as_text = bytes(4 * BLOCK_SIZE).decode()  # the bytes of a block of zeros
    parents: list[bytes] = []
    blocks.extend_digests(parents, [0] * 64 + [5] * 64, "", 2)
    salted: list[bytes] = []
    blocks.extend_digests(salted, [5] * 64, as_text, 1)
    assert salted[0] not in parents
    blocks.extend_digests([], [5] * 64, "\ud800", 1)


def test_release_is_idempotent() -> None:
    """Report S05: the table is emptied by the release, so finish and abort paths may both come; a copy is caught."""
    blocks = BlockManager(4, True)
    table = blocks.allocate(3)
    copy = list(table)
    blocks.release(table)
    blocks.release(table)
    blocks.check_invariants()
    assert blocks.num_free == 4
    with pytest.raises(ValueError, match="released more often"):
        blocks.release(copy)


def test_shared_blocks_count_once() -> None:
    """Report S07: used, cached and free blocks add up however many sequences share a prefix."""
    blocks = BlockManager(8, True)
    ids = fill(blocks, prompt(128))
    tables = []
    for _ in range(5):
        found = find(blocks, prompt(128))
        blocks.acquire(found)
        tables.append(found)
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (2, 0, 6)
    assert blocks.num_released_by(ids) == 0 and blocks.num_shared(ids) == 2
    for table in tables:
        blocks.release(table)
        blocks.check_invariants()
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (0, 2, 6)


def test_cached_blocks_are_evicted_on_demand() -> None:
    """Report S08: prefixes of finished requests never keep new ones out, and do not count as used."""
    host = Host(num_blocks=6, max_model_len=384)
    for index in range(30):
        host.add(request(f"r{index}", 200, 3, family=index))
        host.run()
    host.check()
    assert host.blocks.num_cached > 0 and host.scheduler.stats().num_preemptions == 0


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    blocks = BlockManager(5, True)
    old = fill(blocks, [1] * 128)
    young = fill(blocks, [2] * 128)
    assert find(blocks, [1] * 128) == old
    blocks.acquire(old[:1])
    blocks.release([*old[:1]])  # touched: now the youngest
    blocks.allocate(2)  # the free one, then the tail of the old chain
    assert find(blocks, [1] * 128) == old[:1] and find(blocks, [2] * 128) == young
    blocks.allocate(1)
    assert find(blocks, [2] * 128) == young[:1]
    blocks.check_invariants()


def test_the_first_block_of_a_digest_stays() -> None:
    blocks = BlockManager(4, True)
    digests: list[bytes] = []
    blocks.extend_digests(digests, prompt(64), "", 1)
    one, two = blocks.allocate(2)
    blocks.register(one, digests[0])
    blocks.register(two, digests[0])
    assert find(blocks, prompt(64)) == [one]
    blocks.release([one, two])
    blocks.check_invariants()
    assert (blocks.num_cached, blocks.num_free) == (1, 3)


def test_reset_forgets_what_nobody_uses() -> None:
    blocks = BlockManager(8, True)
    fill(blocks, [1] * 128)
    used = find(blocks, [1] * 64)
    blocks.acquire(used)
    fill(blocks, [2] * 128)
    blocks.reset_prefix_cache()
    blocks.check_invariants()
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (1, 0, 7)
    assert find(blocks, [1] * 128) == used and find(blocks, [2] * 128) == []


def test_forgotten_blocks_cannot_be_found() -> None:
    blocks = BlockManager(8, True)
    fill(blocks, [1] * 128)
    held = find(blocks, [1] * 64)
    blocks.acquire(held)
    digests: list[bytes] = []
    blocks.extend_digests(digests, [1] * 128, "", 2)
    blocks.forget(digests)
    blocks.check_invariants()
    assert find(blocks, [1] * 128) == [] and (blocks.num_used, blocks.num_free) == (1, 7)
    blocks.release(held)
    assert blocks.num_free == 8


def test_without_prefix_cache_nothing_is_kept() -> None:
    blocks = BlockManager(4, False)
    fill(blocks, [1] * 128)
    assert blocks.num_free == 4 and find(blocks, [1] * 128) == []


def test_more_than_available_is_a_caller_error() -> None:
    blocks = BlockManager(2, True)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 available"):
        blocks.allocate(3)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockManager(0, True)


def test_check_invariants_can_fail() -> None:
    blocks = BlockManager(2, True)
    blocks.num_used = 1
    with pytest.raises(AssertionError, match="counted as used"):
        blocks.check_invariants()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 6)), max_size=60), st.booleans())
def test_books_add_up_after_any_operation(operations: list[tuple[int, int, int]], prefix_cache: bool) -> None:
    """Report S06: free + used + cached = total after every operation, and contents are what the digest says."""
    blocks = BlockManager(12, prefix_cache)
    content: dict[int, tuple[int, ...]] = {}  # what a sequence wrote last
    tables: list[list[int]] = []
    for kind, family, count in operations:
        tokens = [family] * (BLOCK_SIZE * count)
        if kind <= 1:  # a sequence arrives: reuses, computes, registers
            digests: list[bytes] = []
            found = blocks.match(digests, tokens, "", count)
            for index, block in enumerate(found):
                assert content[block] == (family, index)
            if count - blocks.num_shared(found) > blocks.num_available:
                continue
            blocks.acquire(found)
            table = found + blocks.allocate(count - len(found))
            blocks.extend_digests(digests, tokens, "", count)
            for index in range(len(found), count):
                content[table[index]] = (family, index)
                blocks.register(table[index], digests[index])
            tables.append(table)
        elif kind == 2 and tables:
            blocks.release(tables.pop(family % len(tables)))
        elif kind == 3:
            blocks.reset_prefix_cache()
        else:
            digests = []
            blocks.extend_digests(digests, tokens, "", count)
            blocks.forget(digests)
        blocks.check_invariants()
        assert blocks.num_free + blocks.num_used + blocks.num_cached == blocks.num_blocks
        assert blocks.num_used == len({block for table in tables for block in table})
