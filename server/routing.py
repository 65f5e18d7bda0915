"""Which replica serves a request: the fewest reserved tokens, ties in rotation, and bounded affinity to a known prefix."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

BLOCK_TOKENS = 64
_REMEMBERED_PREFIXES = 1 << 15
_PREFIX_BLOCKS = [1 << i for i in range(12)]  # prefixes are remembered at 64, 128, .. 131,072 tokens


class Choice(NamedTuple):
    """cost: tokens the request reserves there (the part of its prompt that is likely cached is not counted)."""

    dp_rank: int
    cost: int


class Router:
    """Reserved tokens per replica, counted here from what was sent and what has ended, so that it is never stale.

    A prompt whose first `m` tokens went to a replica before goes there again unless that replica has more than `m`
    reserved tokens above the least loaded one: prefill saved is weighed against load added, and a popular prefix
    spreads over the replicas instead of pinning to one.
    """

    def __init__(self, replicas: list[int]) -> None:
        self.reserved = dict.fromkeys(replicas, 0)
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()  # digest -> bit set of replicas that saw it
        self._turn = 0

    def choose(self, prompt: list[int], salt: str, max_tokens: int, choices: int, override: int | None = None) -> Choice:
        """Reserve for `choices` outputs of one prompt. override: a replica the client named."""
        if len(self.reserved) == 1:
            (dp_rank,) = self.reserved
            matched = 0
        else:
            keys = self._keys(prompt, salt)
            dp_rank, matched = self._pick(keys) if override is None else (override, 0)
            self._remember(keys, dp_rank)
        cost = len(prompt) - matched + max_tokens * choices
        self.reserved[dp_rank] += cost
        return Choice(dp_rank, cost)

    def release(self, dp_rank: int, cost: int) -> None:
        self.reserved[dp_rank] -= cost

    def _pick(self, keys: list[tuple[int, bytes]]) -> tuple[int, int]:
        least = min(self.reserved.values())
        for length, key in reversed(keys):
            seen = self._prefixes.get(key, 0)
            known = [rank for rank in self.reserved if seen >> rank & 1 and self.reserved[rank] <= least + length]
            if known:
                return min(known, key=lambda rank: self.reserved[rank]), length
        tied = [rank for rank, load in self.reserved.items() if load == least]
        self._turn += 1
        return tied[self._turn % len(tied)], 0

    def _keys(self, prompt: list[int], salt: str) -> list[tuple[int, bytes]]:
        """(tokens, digest) of the remembered prefix lengths, shortest first; the salt separates prefix caches."""
        digest, keys, done = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16), [], 0
        for blocks in _PREFIX_BLOCKS:
            length = blocks * BLOCK_TOKENS
            if length > len(prompt):
                break
            digest.update(array("I", prompt[done:length]).tobytes())
            keys.append((length, digest.copy().digest()))
            done = length
        return keys

    def _remember(self, keys: list[tuple[int, bytes]], dp_rank: int) -> None:
        for _, key in keys:
            self._prefixes[key] = self._prefixes.pop(key, 0) | 1 << dp_rank
        while len(self._prefixes) > _REMEMBERED_PREFIXES:
            self._prefixes.popitem(last=False)
