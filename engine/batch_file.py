"""The files of a batch: lines with requests in, one record a line out, complete or not there whenever a run ends."""

from __future__ import annotations

import codecs
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError, RequestRejected
from engine.openai_types import ChatCompletionRequest, CompletionRequest, parse_request

MAX_LINE_BYTES = 64 << 20
URLS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}
BATCH_FIELDS = {"custom_id", "method", "url", "body"}
_RECORD = b'{"id":"'  # how each begins


@dataclass(frozen=True)
class InputLine:
    """One line of the input file, counted from 1."""

    number: int
    raw: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()[:12]

    @property
    def record_id(self) -> str:
        """Names the line in the output: where it stood and what it said."""
        return f"{self.number}-{self.digest}"


def read_lines(path: Path) -> Iterator[InputLine]:
    """All lines that are not blank; the mark that some editors put before a text's first byte is no part of it."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.strip():
                yield InputLine(number, raw.strip())


@dataclass
class Request:
    """What a line asks for; custom_id is known even where the rest is wrong."""

    custom_id: str | None = None
    body: dict[str, Any] = field(default_factory=dict)
    kind: type[CompletionRequest] | type[ChatCompletionRequest] = CompletionRequest

    def read(self, line: InputLine, defaults: dict[str, Any]) -> None:
        """Fill from a line. Raises RequestRejected naming the field and the fix."""
        if len(line.raw) > MAX_LINE_BYTES:
            raise RequestRejected(f"the line has {len(line.raw)} bytes; at most {MAX_LINE_BYTES}")
        try:
            value = msgspec.json.decode(line.raw.decode())
        except UnicodeDecodeError as error:
            raise RequestRejected(f"the line is not UTF-8 (byte {error.start}); save the file as UTF-8") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestRejected(f"the line is not JSON: {error}; write one JSON value a line") from error
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict):
            raise RequestRejected("the line must be a JSON object or a text in quotes")
        if "url" in value or "body" in value or "method" in value:
            self._read_batch_line(value)
        else:
            custom_id = value.pop("custom_id", None)
            self.custom_id = _checked_id(custom_id)
            if ("prompt" in value) == ("messages" in value):
                raise RequestRejected("the line needs either prompt or messages (or custom_id, url and body)", param="prompt")
            self.body, self.kind = value, CompletionRequest if "prompt" in value else ChatCompletionRequest
        self.body = defaults | self.body
        _check_body(self.body)

    def _read_batch_line(self, value: dict[str, Any]) -> None:
        self.custom_id = _checked_id(value.get("custom_id"))
        if unknown := sorted(value.keys() - BATCH_FIELDS):
            raise RequestRejected(
                f"{unknown[0]}: no field of a batch line; it has {', '.join(sorted(BATCH_FIELDS))}", param=unknown[0]
            )
        if self.custom_id is None:
            raise RequestRejected("custom_id: is required in a batch line", param="custom_id")
        if value.get("method", "POST") != "POST":
            raise RequestRejected(f"method: must be POST, got {value['method']!r}", param="method")
        url = value.get("url")
        if not isinstance(url, str) or url not in URLS:
            raise RequestRejected(f"url: must be one of {', '.join(URLS)}, got {url!r:.100}", param="url")
        if not isinstance(value.get("body"), dict):
            raise RequestRejected("body: must be a JSON object", param="body")
        self.body, self.kind = value["body"], URLS[url]  # type: ignore[assignment]


def _check_body(body: dict[str, Any]) -> None:
    """What a batch has no use for, whatever the request."""
    if body.get("stream"):
        raise RequestRejected("stream: a batch has no streams; remove it", param="stream")
    if body.get("data_parallel_rank"):
        raise RequestRejected("data_parallel_rank: a batch runs on one replica; remove it", param="data_parallel_rank")


def read_defaults(text: str) -> dict[str, Any]:
    """Body fields for all lines, from JSON. Raises ConfigError for fields that neither a prompt nor a chat of a batch could
    have, or that each line brings."""
    try:
        defaults = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--defaults: is not JSON: {error}") from error
    if not isinstance(defaults, dict):
        raise ConfigError("--defaults: must be a JSON object of body fields")
    message = {"role": "user", "content": "x"}
    if own := sorted(defaults.keys() & {"prompt", "messages"}):
        raise ConfigError(f"--defaults: {own[0]}: is what each line of the input brings; remove it")
    for kind, least in ((ChatCompletionRequest, {"messages": [message]}), (CompletionRequest, {"prompt": "x"})):
        try:
            parse_request(kind, least | defaults)
            _check_body(defaults)
        except RequestRejected as error:
            problem = error
        else:
            return defaults
    raise ConfigError(f"--defaults: {problem}") from problem


def _checked_id(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestRejected(f"custom_id: must be a text, got {value!r}", param="custom_id")
    return value


# ---- the output file


class OutputFile:
    """Appends whole lines; knows which input lines are done. Held under a lock: one run at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if another run holds the file or its content is not ours."""
        self.path = path
        if path.exists() and not path.is_file():
            raise ConfigError(f"--output {path}: must be a regular file, because a run that goes on reads it")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise ConfigError(f"--output {path}: another run is writing it; wait for it or choose another file") from error
        self.done: dict[int, str] = {}
        self._read()

    def _read(self) -> None:
        """Collect finished lines and cut off a last line that a killed run left torn."""
        good = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and raw.startswith(_RECORD[: len(raw)]):
                    break
                try:
                    line, digest = msgspec.json.decode(raw)["id"].split("-")
                    self.done[int(line)] = digest
                except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
                    raise ConfigError(
                        f"--output {self.path}: line {number} was not written by this command; choose another file"
                    ) from error
                good += len(raw)
        if good < self.path.stat().st_size:
            os.ftruncate(self._file, good)

    def has(self, line: InputLine) -> bool:
        """Whether the line is done. Raises ConfigError if its text was another one then."""
        digest = self.done.get(line.number)
        if digest is not None and digest != line.digest:
            raise ConfigError(
                f"--output {self.path}: was written for another input (line {line.number} differs); choose another file"
            )
        return digest is not None

    def write(
        self, line: InputLine, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> None:
        """One record, complete in the file when this returns."""
        record = {"id": line.record_id, "custom_id": custom_id, "response": response, "error": error}
        data = memoryview(msgspec.json.encode(record) + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ConfigError(
                f"--output {self.path}: cannot be written: {error.strerror}; make room, and the same command goes on from here"
            ) from error
        self.done[line.number] = line.digest

    def close(self) -> None:
        os.close(self._file)
