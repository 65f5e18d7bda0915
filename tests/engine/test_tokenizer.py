"""Tokenizer and incremental detokenizer: exact round trips, control tokens apart from text, bad files named."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, RequestRejected
from engine.hub import resolve_model
from engine.tiktoken_model import KIMI_PATTERN, byte_alphabet, read_ranks
from engine.tokenizer import IncrementalDetokenizer, Tokenizer

DEMO = resolve_model("demo")
TOKENIZER = Tokenizer.load(DEMO)
TEXTS = [
    "",
    "In the beginning",
    "  two  spaces\n\n\ttabs",
    "naïve café 你好世界 🎉👨‍👩‍👧‍👦 e\u0301",
    "def f(x):\n    return x ** 2\n",
    "a\x00b\x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_equals_the_tokenizers_package(text: str) -> None:
    reference = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids) == text


def test_allowed_control_tokens_equal_the_tokenizers_package() -> None:
    reference = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    text = "<｜User｜>hi <think> there</think><｜end▁of▁sentence｜>\n"
    ids = TOKENIZER.encode(text, add_special_tokens=False, allow_special=True)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special=False) == text
    assert TOKENIZER.decode(ids) == "hi  there\n"


def test_text_never_becomes_a_control_token() -> None:
    """Report X13: placeholder and turn tokens typed as plain text stay text."""
    for token, token_id in TOKENIZER.control_tokens.items():
        ids = TOKENIZER.encode(f"x {token} y", add_special_tokens=False)
        assert token_id not in ids
        assert TOKENIZER.decode(ids, skip_special=True) == f"x {token} y"


def test_guarded_text_stays_text_among_allowed_control_tokens() -> None:
    """Report X13: a template's own token counts, the same spelling in user text does not."""
    guarded = TOKENIZER.guarded("say <｜User｜> or </think>", "\ufdd0", exempt=("</think>",))
    ids = TOKENIZER.encode(f"<｜User｜>{guarded}", add_special_tokens=False, allow_special=True, guard="\ufdd0")
    assert ids.count(TOKENIZER.control_tokens["<｜User｜>"]) == 1 and ids[0] == TOKENIZER.control_tokens["<｜User｜>"]
    assert ids.count(TOKENIZER.control_tokens["</think>"]) == 1
    assert TOKENIZER.decode(ids, skip_special=False) == "<｜User｜>say <｜User｜> or </think>"


def test_beginning_of_sequence_follows_tokenizer_config() -> None:
    assert TOKENIZER.encode("a")[0] == TOKENIZER.bos_token_id
    assert TOKENIZER.encode("a", add_special_tokens=False)[0] != TOKENIZER.bos_token_id


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), st.booleans())
def test_deltas_join_to_the_full_decode(ids: list[int], skip_special: bool) -> None:
    """Reports T02, T03, T14: any id sequence, whole characters only, lone bytes drain at the end, special tokens apart."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == TOKENIZER.decode(ids, skip_special)


def test_no_replacement_mark_inside_a_character() -> None:
    """Reports T02, T03: an emoji over several tokens appears once it is whole, also before a token that begins with a space."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    ids = TOKENIZER.encode("é🎉 ok 漢字", add_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) == "é🎉 ok 漢字" and not any("\ufffd" in piece for piece in pieces)
    first_byte = next(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == b"\xf0")
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.push(first_byte) == ""
    space = TOKENIZER.encode(" ok", add_special_tokens=False)
    assert detokenizer.push(space[0]).startswith("\ufffd ")


def test_ids_out_of_range_are_refused() -> None:
    """Report T13: an id outside the vocabulary fails this call only."""
    for bad in (-1, TOKENIZER.vocab_size):
        with pytest.raises(RequestRejected, match="out of range"):
            IncrementalDetokenizer(TOKENIZER).push(bad)
    assert TOKENIZER.decode([5]) == TOKENIZER.decode([5])


def test_vocabulary_size_is_the_models(tmp_path: Path) -> None:
    """Report L14: the model's head decides; ids it has beyond the tokenizer decode to nothing."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": TOKENIZER.vocab_size + 500}))
    larger = Tokenizer.load(tmp_path)
    assert larger.vocab_size == TOKENIZER.vocab_size + 500
    assert larger.decode([TOKENIZER.vocab_size + 499], skip_special=False) == ""


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestRejected, match="Unicode"):
        TOKENIZER.encode("a\ud800b")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.model": b"x"}, "convert it to tokenizer.json"),
        ({"tokenizer.json": b"{"}, "not readable JSON"),
        ({"tokenizer.json": b"[]"}, "JSON object"),
        ({"tokenizer.json": b'{"model": {"type": "Unigram"}, "decoder": {"type": "Metaspace"}}'}, "byte-level BPE"),
        ({"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}}, "decoder": {"type": "ByteLevel"}}'}, "loaded"),
        ({"tiktoken.model": b"zzz\n"}, "line 1"),
        ({"tiktoken.model": b"YQ== 0\n"}, "every single byte"),
    ],
)
def test_bad_tokenizer_files_are_named(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    """Report L11: one line that names the file and the fix."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# ---- tiktoken.model


def kimi_folder(folder: Path) -> list[bytes]:
    """A small ranks file in Kimi's format, trained on this repository's own sources; returns the tokens by rank."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=byte_alphabet(), special_tokens=[], show_progress=False
    )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI_PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    sources = sorted(Path(__file__).parent.glob("*.py"))
    model.train_from_iterator([path.read_text() for path in sources] + ["中文 mixed 混合 文字 text " * 50], trainer)
    byte_of = {character: value for value, character in enumerate(byte_alphabet())}
    vocabulary = sorted(model.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[character] for character in text) for text, _ in vocabulary]
    (folder / "tiktoken.model").write_bytes(
        b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    )
    config = {
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(len(tokens)): {"content": "[BOS]", "special": True},
            str(len(tokens) + 1): {"content": "[EOS]", "special": True},
            str(len(tokens) + 2): {"content": "<|im_end|>", "special": True},
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokens) + 258, "eos_token_id": len(tokens) + 1}))
    return tokens


def merge_by_rank(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's definition: the neighbours whose join has the lowest rank merge first."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 60))
        if parts[best] + parts[best + 1] not in ranks:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return [ranks[part] for part in parts]


def test_tiktoken_model_encodes_by_rank(tmp_path: Path) -> None:
    """Report L11: Kimi's tokenizer file needs no further package; its ids follow the ranks."""
    kimi_folder(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ranks = read_ranks(tmp_path / "tiktoken.model")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI_PATTERN), "isolated")
    rng = random.Random(0)
    alphabet = "abcdefgh ABC  \n12345.,()_'s中文混合éü🎉"
    texts = ["".join(rng.choice(alphabet) for _ in range(40)) for _ in range(200)] + [Path(__file__).read_text()]
    for text in texts:
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
        assert "".join(pieces) == text
        expected = [token_id for piece in pieces for token_id in merge_by_rank(piece.encode(), ranks)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected) == text
    assert [piece for piece, _ in split.pre_tokenize_str("中文English混合")] == ["中文", "English", "混合"]


def test_tiktoken_model_reserves_control_tokens(tmp_path: Path) -> None:
    tokens = kimi_folder(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_token_id == len(tokens) and tokenizer.eos_token_id == len(tokens) + 1
    assert tokenizer.token_id("<|im_end|>") == len(tokens) + 2
    assert tokenizer.token_id(f"<|reserved_token_{len(tokens) + 257}|>") == len(tokens) + 257
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [len(tokens) + 2]
    assert len(tokenizer.encode("<|im_end|>")) > 1
