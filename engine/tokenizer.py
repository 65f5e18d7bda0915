"""Text to token ids and back, on the `tokenizers` package alone.

Control tokens (end of turn, think tags, tool-call marks) are kept out of the byte-pair encoder: text that merely spells
one becomes ordinary tokens, unless the caller allows them. Decoding works on bytes, so that a character split over
tokens is whole or not there at all.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from engine.errors import ConfigError, RequestRejected
from engine.tiktoken_model import byte_alphabet, tiktoken_vocabulary

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
CONTROL_BRACKETS = ("<", "[", "｜")  # an added token that opens with one of these is markup, not text


@dataclass(frozen=True)
class AddedToken:
    """A token outside the byte-pair vocabulary. special: hidden from text by skip_special_tokens."""

    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False

    @property
    def is_control(self) -> bool:
        """Whether text must not produce it by spelling it. Some vocabularies also add plain letters; those stay text."""
        return self.special or (len(self.content) > 2 and self.content.startswith(CONTROL_BRACKETS))

    @property
    def pattern(self) -> str:
        return (r"\s*" if self.lstrip else "") + re.escape(self.content) + (r"\s*" if self.rstrip else "")


class Tokenizer:
    """Encodes and decodes; holds no state of a request. Safe to use from several threads.

    vocab_size: the model's (config.json), which may exceed the tokenizer's; ids without a token decode to nothing
    bos_token_id, eos_token_id: None if the tokenizer names none
    """

    def __init__(
        self, backend: dict[str, Any], added: dict[int, AddedToken], config: dict[str, Any], vocab_size: int = 0
    ) -> None:
        """backend: content of a tokenizer.json; added: its added tokens; config: content of tokenizer_config.json."""
        named = named_tokens(config)
        self._added = {
            token_id: AddedToken(token.content, True, token.lstrip, token.rstrip) if token.content in named.values() else token
            for token_id, token in added.items()
        }
        self._control = {token.content: token_id for token_id, token in self._added.items() if token.is_control}
        by_length = sorted((self._added[i] for i in self._control.values()), key=lambda token: -len(token.content))
        self._control_pattern = re.compile("(" + "|".join(token.pattern for token in by_length) + ")") if by_length else None
        self._spellings = re.compile("|".join(re.escape(token.content) for token in by_length) or r"(?!)")
        self.special_token_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self._text = tokenizers.Tokenizer.from_str(msgspec.json.encode(_without_control(backend, self._control)).decode())
        self._text.no_truncation()
        self._text.no_padding()
        self._bytes = self._token_bytes(backend)
        self.vocab_size = vocab_size or len(self._bytes)
        self._ids = {token.content: token_id for token_id, token in self._added.items()}
        self.bos_token_id = self.token_id(named.get("bos_token", ""))
        self.eos_token_id = self.token_id(named.get("eos_token", ""))
        self._prefix, self._suffix = self._template_ids(backend, config)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder's tokenizer. Raises ConfigError naming the file and the fix."""
        config = tokenizer_config(folder)
        declared = _declared_added(config)
        if (folder / "tokenizer.json").is_file():
            backend = read_json(folder / "tokenizer.json")
            added = {entry["id"]: _added_token(entry) for entry in backend.get("added_tokens", [])} | declared
        elif (folder / "tiktoken.model").is_file():
            backend, reserved = tiktoken_vocabulary(folder / "tiktoken.model")
            added = {token_id: AddedToken(name, True) for token_id, name in reserved.items()} | declared
        else:
            other = next((name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()), None)
            found = f"{other} is no format this engine reads; convert it to tokenizer.json" if other else "copy it there"
            raise ConfigError(f"{folder}: no tokenizer.json (nor a tiktoken.model): {found}")
        try:
            return cls(backend, added, config, model_vocab_size(folder))
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error
        except Exception as error:  # the tokenizers package raises bare Exception for a malformed file
            raise ConfigError(f"{folder}/tokenizer.json cannot be loaded: {error}; fetch the file again") from error

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False, guard: str = "") -> list[int]:
        """Token ids of `text`.

        add_special_tokens: add what the tokenizer puts around a text (usually a beginning-of-sequence token)
        allow_special: a control token spelled in the text becomes that token (for templates and trusted prompts)
        guard: a character that marks, inside a control token's spelling, text that must stay text; it is removed
        """
        if allow_special and self._control_pattern is not None:
            ids: list[int] = []
            for index, piece in enumerate(self._control_pattern.split(text)):
                if index % 2:
                    ids.append(self._control[piece if piece in self._control else piece.strip()])
                elif piece:
                    ids += self._encode_text(piece.replace(guard, "") if guard else piece)
        else:
            ids = self._encode_text(text)
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def _encode_text(self, text: str) -> list[int]:
        try:
            return self._text.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate, which JSON escapes can smuggle in
            raise RequestRejected("prompt: is not valid Unicode text (a lone surrogate)", param="prompt") from error

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of all ids at once; broken byte sequences become U+FFFD. Raises RequestRejected for an id out of range."""
        return b"".join(self.visible_bytes(token_id, skip_special) for token_id in ids).decode("utf-8", "replace")

    def visible_bytes(self, token_id: int, skip_special: bool) -> bytes:
        """Bytes an id contributes to the text; empty for hidden special tokens and for ids without a token."""
        if skip_special and token_id in self.special_token_ids:
            return b""
        return self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, which may be part of a character. Raises RequestRejected for an id out of range."""
        if not 0 <= token_id < self.vocab_size:
            raise RequestRejected(f"token id {token_id} is out of range 0..{self.vocab_size - 1}", code="internal")
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """A token for display: its text, or `bytes:\\x..` where it is no whole character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_id(self, content: str) -> int | None:
        """Id of an added token by its spelling, else of a vocabulary entry, else None."""
        if content in self._ids:
            return self._ids[content]
        return self._text.token_to_id(content) if content else None

    def guarded(self, text: str, guard: str, exempt: tuple[str, ...] = ()) -> str:
        """`text` with the guard inside every control token it spells, so that `encode(guard=...)` leaves them text."""

        def mark(match: re.Match[str]) -> str:
            spelled = match[0]
            return spelled if spelled in exempt else spelled[0] + guard + spelled[1:]

        return self._spellings.sub(mark, text)

    @property
    def control_tokens(self) -> dict[str, int]:
        """Spelling -> id of every control token. Not to be changed."""
        return self._control

    def _token_bytes(self, backend: dict[str, Any]) -> list[bytes]:
        vocabulary: dict[str, int] = backend["model"]["vocab"]
        size = 1 + max([*vocabulary.values(), *self._added])
        table = [b""] * size
        for text, token_id in vocabulary.items():
            if token_id not in self._added:
                table[token_id] = bytes(map(_BYTE_OF.__getitem__, text)) if _BYTE_OF.keys() >= set(text) else text.encode()
        for token_id, token in self._added.items():
            table[token_id] = token.content.encode()
        return table

    def _template_ids(self, backend: dict[str, Any], config: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Ids put before and after a text. tokenizer_config.json's add_bos_token decides where it is present."""
        prefix, suffix = _post_processor_ids(backend.get("post_processor"))
        if isinstance(add := config.get("add_bos_token"), bool):
            prefix = [self.bos_token_id] if add and self.bos_token_id is not None else []
        if isinstance(add := config.get("add_eos_token"), bool):
            suffix = [self.eos_token_id] if add and self.eos_token_id is not None else []
        return prefix, suffix


class IncrementalDetokenizer:
    """Text of a growing id sequence: bytes wait until their character is whole; all pieces joined equal the full decode.

    keep: special token ids that are shown in spite of skip_special (marks a parser needs)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, keep: frozenset[int] = frozenset()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_token_ids - keep if skip_special else frozenset[int]()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """Text that became certain with this id. Raises RequestRejected for an id out of range."""
        return "" if token_id in self._hidden else self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What a trailing incomplete character leaves: U+FFFD or nothing."""
        return self._decode(b"", final=True)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object file. Raises ConfigError naming it."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def model_vocab_size(folder: Path) -> int:
    """Rows of the model's head from config.json, 0 if there is none: masks and id checks go by the model."""
    if not (folder / "config.json").is_file():
        return 0
    config = read_json(folder / "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0
    return size if isinstance(size, int) else 0


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Content of tokenizer_config.json, nothing without one."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Spelling of the NAMED_TOKENS in tokenizer_config.json, where each is a string or an object with `content`."""
    values = {name: config.get(name) for name in NAMED_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}


def _added_token(entry: dict[str, Any]) -> AddedToken:
    return AddedToken(entry["content"], bool(entry.get("special")), bool(entry.get("lstrip")), bool(entry.get("rstrip")))


def _declared_added(config: dict[str, Any]) -> dict[int, AddedToken]:
    return {int(token_id): _added_token(entry) for token_id, entry in (config.get("added_tokens_decoder") or {}).items()}


def _without_control(backend: dict[str, Any], control: dict[str, int]) -> dict[str, Any]:
    """The same tokenizer without control tokens, so that no text can become one. Raises ConfigError on other formats."""
    model = backend.get("model") or {}
    decoder = backend.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    if model.get("type") != "BPE" or [step.get("type") for step in steps] != ["ByteLevel"]:
        kinds = "+".join(str(step.get("type")) for step in steps)
        raise ConfigError(f"tokenizer: {model.get('type')} model with {kinds} decoder is not supported; byte-level BPE is")
    kept = [entry for entry in backend.get("added_tokens", []) if entry["content"] not in control]
    vocabulary = {text: token_id for text, token_id in model["vocab"].items() if text not in control}
    # Kept ones also go into the vocabulary: the package would number them anew where lower ids are gone.
    return {
        **backend,
        "added_tokens": kept,
        "model": {**model, "vocab": vocabulary | {entry["content"]: entry["id"] for entry in kept}},
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _post_processor_ids(processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Ids a tokenizer.json's TemplateProcessing puts before and after a single text."""
    processor = processor or {}
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            before: list[int] = []
            after: list[int] = []
            seen = False
            for part in step["single"]:
                if "Sequence" in part:
                    seen = True
                else:
                    (after if seen else before).extend(step["special_tokens"][part["SpecialToken"]["id"]]["ids"])
            return before, after
    return [], []


_BYTE_OF = {character: value for value, character in enumerate(byte_alphabet())}
