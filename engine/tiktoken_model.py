"""Kimi's `tiktoken.model` (a byte string and its rank a line) as a byte-level BPE vocabulary.

The file has no merge list: a pair of tokens merges when its bytes are themselves a token, lowest rank first. Listing every
such pair in the order of the rank it forms gives a merge list with the same result.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

RESERVED_TOKENS = 258  # ids after the ranks that Kimi's tokenizer reserves for control tokens
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank. Raises ConfigError naming the line that is wrong."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{path}, line {number}: expected a base64 token and its rank; fetch the file again") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([value]) not in ranks for value in range(256)):
        raise ConfigError(f"{path}: ranks must count up from 0 and cover every single byte; the file is cut or changed")
    return ranks


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte value in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other byte values take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def tiktoken_vocabulary(path: Path) -> tuple[dict[str, Any], dict[int, str]]:
    """(content of an equivalent tokenizer.json, reserved id -> name). Takes seconds for a vocabulary of 160,000."""
    ranks = read_ranks(path)
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[value] for value in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in pairs]
    backend: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": KIMI_PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # a piece that is itself a token is taken whole
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }
    reserved = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(len(ranks), len(ranks) + RESERVED_TOKENS)}
    return backend, reserved
