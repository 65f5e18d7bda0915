"""Who holds which cache block, and which blocks hold a known prefix.

Every block is in exactly one of three states: used (some sequence refers to it), cached (nobody does, but it holds a known
prefix and can be found again) or free. Cached blocks are given away, least recently used first, when no free one is left.
Every operation takes constant time a block. Knows no requests.

Prefix digests are BLAKE2b over (digest of the parent block, tokens of the block); the first parent is made of a root drawn
at random for this process and of the request's salt. So a digest covers every ancestor and the salt, nobody outside can
compute one, and equal digests mean equal tokens.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_SIZE = 64  # tokens per block; kernels.layout.BLOCK_SIZE, which host files cannot import
DIGEST_BYTES = 32


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockManager:
    """Blocks 0 .. num_blocks - 1. Device steps run in the order they were planned, which is all the protection a block that
    changes hands needs (engine/scheduler.py)."""

    def __init__(self, num_blocks: int, prefix_cache: bool) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.num_used = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._root = os.urandom(DIGEST_BYTES)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only wait to be found again."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks `allocate` can give."""
        return len(self._free) + len(self._cached)

    # ---- references

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one reference. Raises ValueError beyond num_available: ask first."""
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available")
        free, references = self._free, self._references
        blocks = []
        for _ in range(count):
            block = free.pop() if free else self._evict()
            references[block] = 1
            blocks.append(block)
        self.num_used += count
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these used or cached blocks."""
        references = self._references
        for block in blocks:
            if not references[block]:
                del self._cached[block]
                self.num_used += 1
            references[block] += 1

    def release(self, block_ids: list[int]) -> None:
        """Give back one reference to each block of a block table and empty the table, so that a second call does nothing.

        The last block is given back first and so reused first: a chain loses its tail before its head.
        """
        references = self._references
        while block_ids:
            block = block_ids.pop()
            if references[block] < 1:
                raise ValueError(f"block {block} released more often than acquired")
            references[block] -= 1
            if not references[block]:
                self.num_used -= 1
                if self._digest_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def num_released_by(self, block_ids: Sequence[int]) -> int:
        """How many blocks would become available if this table were released now."""
        references = self._references
        return sum(1 for block in block_ids if references[block] == 1)

    def num_shared(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks some sequence uses already."""
        references = self._references
        return sum(1 for block in block_ids if references[block])

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._drop_digest(block)
        return block

    def _drop_digest(self, block: int) -> None:
        digest = self._digest_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest_of[block] = None

    # ---- prefixes

    def extend_digests(self, digests: list[bytes], token_ids: Sequence[int], salt: str, count: int) -> None:
        """Append to `digests` until it covers the first `count` full blocks of a sequence."""
        for index in range(len(digests), count):
            parent = digests[-1] if index else self._root_digest(salt)
            tokens = array("i", token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            digests.append(blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES, person=b"block").digest())

    def _root_digest(self, salt: str) -> bytes:
        return blake2b(self._root + salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"salt").digest()

    def match(self, digests: list[bytes], token_ids: Sequence[int], salt: str, most: int) -> list[int]:
        """Blocks that hold the longest known prefix of a sequence, at most `most`. Takes no reference.

        `digests` is the sequence's own list, extended as far as the search goes.
        """
        found: list[int] = []
        if self.prefix_cache:
            while len(found) < most:
                if len(found) == len(digests):
                    self.extend_digests(digests, token_ids, salt, len(digests) + 1)
                block = self._block_of.get(digests[len(found)])
                if block is None:
                    break
                found.append(block)
        return found

    def register(self, block: int, digest: bytes) -> None:
        """Make a used block findable: all its tokens are computed and accepted. The first block of a digest stays."""
        if self.prefix_cache and digest not in self._block_of and self._digest_of[block] is None:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget(self, digests: Sequence[bytes]) -> None:
        """Make blocks unfindable, because their content is in doubt."""
        for digest in digests:
            block = self._block_of.get(digest)
            if block is not None:
                self._drop_digest(block)
                if block in self._cached:
                    del self._cached[block]
                    self._free.append(block)

    def reset_prefix_cache(self) -> None:
        """Free every cached block. Blocks in use stay findable."""
        for block in self._cached:
            self._drop_digest(block)
        self._free.extend(self._cached)
        self._cached.clear()

    # ---- checks

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not add up. Time proportional to the number of blocks: for tests."""
        used = {block for block, count in enumerate(self._references) if count > 0}
        free, cached = set(self._free), set(self._cached)
        assert min(self._references) >= 0, "negative reference count"
        assert len(free) == len(self._free), "a block is free twice"
        assert self.num_used == len(used), f"{self.num_used} blocks counted as used, {len(used)} are"
        assert not (used & free or used & cached or free & cached), "a block is in two states"
        assert len(used) + len(free) + len(cached) == self.num_blocks, "free + used + cached differs from the total"
        assert all(self._digest_of[block] is None for block in free), "a free block is findable"
        assert all(self._digest_of[block] is not None for block in cached), "a cached block cannot be found"
        by_block = {block: digest for block, digest in enumerate(self._digest_of) if digest is not None}
        assert by_block == {block: digest for digest, block in self._block_of.items()}, "prefix map and blocks disagree"
