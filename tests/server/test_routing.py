"""Routing of requests to replicas."""

from __future__ import annotations

from collections import Counter

from server.routing import BLOCK_TOKENS, Router


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 50_000 for i in range(length)]


def test_a_burst_of_equal_requests_spreads_evenly_and_ties_rotate() -> None:
    """Report D12: counts differ by at most one, and the first of a tie is not always the same replica."""
    for replicas in (2, 4):
        router = Router(list(range(replicas)))
        chosen = [router.choose(prompt(i, 32), "", 16, 1).dp_rank for i in range(41)]
        counts = Counter(chosen)
        assert max(counts.values()) - min(counts.values()) <= 1
        for choice in chosen:
            router.release(choice, 48)
        firsts = set()
        for i in range(replicas):
            choice = router.choose(prompt(100 + i, 32), "", 16, 1)
            router.release(*choice)
            firsts.add(choice.dp_rank)
        assert firsts == set(range(replicas))


def test_tokens_count_not_requests() -> None:
    """Report D14: one replica with a long prompt gets no more until the others have as much."""
    router = Router([0, 1])
    long = router.choose(prompt(0, 6400), "", 100, 1).dp_rank
    short = [router.choose(prompt(i, 50), "", 50, 1).dp_rank for i in range(1, 65)]
    assert short.count(long) == 0


def test_a_known_prefix_goes_back_to_its_replica() -> None:
    router = Router([0, 1, 2, 3])
    shared = prompt(1, 40 * BLOCK_TOKENS)
    first = router.choose(shared + prompt(2, 10), "", 20, 1)
    router.release(*first)
    for turn in range(8):
        choice = router.choose(shared + prompt(3 + turn, 30), "", 20, 1)
        assert choice.dp_rank == first.dp_rank
        assert choice.cost < len(shared)  # the cached part costs nothing
        router.release(*choice)


def test_affinity_is_bounded() -> None:
    """Report D13: a group that shares a prefix spreads over the replicas instead of pinning to one."""
    router = Router([0, 1, 2, 3])
    shared = prompt(1, 8 * BLOCK_TOKENS)
    counts = Counter(router.choose(shared + prompt(i, 8), "", 64, 1).dp_rank for i in range(16))
    assert max(counts.values()) <= 6 and len(counts) == 4


def test_salt_separates_prefixes() -> None:
    """Report X12: requests of another tenant do not follow this one's prefix."""
    router = Router([0, 1, 2, 3])
    shared = prompt(1, 64 * BLOCK_TOKENS)
    router.release(*router.choose(shared, "a", 10, 1))
    places = set()
    for _ in range(4):
        choice = router.choose(shared, "b", 10, 1)
        assert choice.cost >= len(shared) or choice.dp_rank in places
        places.add(choice.dp_rank)
        router.release(*choice)
    assert router.reserved == dict.fromkeys(range(4), 0)


def test_override_and_choices() -> None:
    router = Router([0, 1])
    assert router.choose(prompt(0, 10), "", 5, 3, override=1) == (1, 25)
    assert router.reserved == {0: 0, 1: 25}
