"""`python -m engine.offline --model M --input in.jsonl --output out.jsonl`: a batch file through the engine.

A line is a plain prompt ("text", {"prompt": ...} or {"messages": ...} with any sampling field) or an OpenAI batch line
({"custom_id", "method", "url", "body"}) for completions or chat completions. Each gives one output line, written as it
finishes; a bad line gives one with an error. Started again after any kind of end, the same command goes on: lines whose
output is complete are not run again.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from tqdm import tqdm

from engine.arguments import add_engine_arguments, engine_config
from engine.errors import ConfigError, RequestRejected
from engine.hub import resolve_model
from engine.messages import AddRequest, RequestFailed, TokenOutput
from engine.openai_responses import Choice, error_body, response_body
from engine.openai_types import ChatCompletionRequest, CompletionRequest, parse_request
from engine.served_model import ServedModel, Work

MAX_LINE_BYTES = 64 << 20
URLS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}
BATCH_FIELDS = {"custom_id", "method", "url", "body"}


class Engine(Protocol):
    """What the runner needs of engine.core.EngineCore."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_id: str, reason: str = "abort") -> Any: ...

    def step(self) -> list[TokenOutput | RequestFailed]: ...


# ---- lines


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


def check_defaults(defaults: dict[str, Any]) -> None:
    """Raises ConfigError for body fields that neither a prompt nor a chat of a batch could have, or that each line brings."""
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
            return
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
                if not raw.endswith(b"\n"):
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


# ---- running


@dataclass
class Running:
    """One line in the engine."""

    line: InputLine
    custom_id: str | None
    work: Work
    choices: list[Choice]
    started: float
    unfinished: int


@dataclass
class Totals:
    answered: int = 0
    refused: int = 0
    output_tokens: int = 0


class BatchRunner:
    """Keeps the engine filled from the input and writes what finishes."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        output: OutputFile,
        *,
        defaults: dict[str, Any],
        max_in_flight: int,
        progress: tqdm | None = None,
    ) -> None:
        """defaults: body fields for lines that do not set them; max_in_flight: choices in the engine at once."""
        self._engine = engine
        self._model = model
        self._output = output
        self._defaults = defaults
        self._max_in_flight = max_in_flight
        self._progress = progress
        self._live: dict[str, tuple[Running, Choice]] = {}
        self._first_use: dict[str, int] = {}
        self._clock = time.monotonic()
        self.totals = Totals()

    def run(self, lines: Iterator[InputLine]) -> Totals:
        """Until every line has its record."""
        waiting: InputLine | None = next(lines, None)
        while waiting is not None or self._live:
            while waiting is not None and len(self._live) < self._max_in_flight:
                self._start(waiting)
                waiting = next(lines, None)
            for output in self._engine.step() if self._live else []:
                self._take(output)
        return self.totals

    def _start(self, line: InputLine) -> None:
        request = Request()
        try:
            request.read(line, self._defaults)
            self._check_unique(request.custom_id, line.number)
            parsed = parse_request(request.kind, request.body)
            work = self._model.completion(parsed) if isinstance(parsed, CompletionRequest) else self._model.chat(parsed)
            choices = [Choice(self._model, work, index) for index in range(work.num_choices)]
            running = Running(line, request.custom_id, work, choices, time.time(), len(choices))
            for index, add in enumerate(work.add_requests(running.started)):
                request_id = f"{line.number}-{index}"  # unique here, whatever ids the lines give themselves
                self._engine.add(msgspec.structs.replace(add, request_id=request_id))
                self._live[request_id] = running, choices[index]
        except RequestRejected as error:
            self._drop(line.number)
            self._refuse(line, request.custom_id, error)

    def _check_unique(self, custom_id: str | None, number: int) -> None:
        if custom_id is not None and (first := self._first_use.setdefault(custom_id, number)) != number:
            raise RequestRejected(
                f"custom_id: {custom_id!r} is already that of line {first}; give each line its own", param="custom_id"
            )

    def remember(self, line: InputLine) -> None:
        """A line of an earlier run: its custom_id is taken."""
        request = Request()
        with contextlib.suppress(RequestRejected):
            request.read(line, {})
        if request.custom_id is not None:
            self._first_use.setdefault(request.custom_id, line.number)

    def _take(self, output: TokenOutput | RequestFailed) -> None:
        running, choice = self._live.get(output.request_id, (None, None))
        if running is None or choice is None:
            return  # ended here already, by a stop string or an error
        try:
            if isinstance(output, RequestFailed):
                raise RequestRejected(output.message, code=output.code, param=output.param)
            choice.push(output)
        except RequestRejected as error:
            self._drop(running.line.number)
            self._refuse(running.line, running.custom_id, error)
            return
        self.totals.output_tokens += len(output.token_ids)
        if choice.stopped_by_string:
            self._engine.abort(output.request_id, "stop")
        if choice.stream.finish_reason is not None:
            del self._live[output.request_id]
            running.unfinished -= 1
            if running.unfinished == 0:
                body = response_body(self._model, running.work, running.choices, running.started)
                response = {"status_code": 200, "request_id": running.work.request_id, "body": body}
                self._output.write(running.line, running.custom_id, response, None)
                self.totals.answered += 1
                self._advance()

    def _drop(self, number: int) -> None:
        """Take every choice of a line out of the engine."""
        for request_id in [key for key, (running, _) in self._live.items() if running.line.number == number]:
            del self._live[request_id]
            self._engine.abort(request_id)

    def _refuse(self, line: InputLine, custom_id: str | None, error: RequestRejected) -> None:
        _, body = error_body(error)
        self._output.write(line, custom_id, None, {**body["error"], "message": f"line {line.number}: {error}"})
        self.totals.refused += 1
        self._advance()

    def _advance(self) -> None:
        if self._progress is not None:
            speed = self.totals.output_tokens / max(time.monotonic() - self._clock, 1e-9)
            self._progress.set_postfix_str(f"{speed:.0f} tokens/s, {self.totals.refused} refused", refresh=False)
            self._progress.update()


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when every line has its record (also those with errors), 2 for wrong arguments, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m engine.offline", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--input", required=True, type=Path, help="JSON lines")
    parser.add_argument("--output", required=True, type=Path, help="JSON lines; a run that ended early is continued")
    parser.add_argument(
        "--defaults", default="{}", metavar="JSON", help="body fields for all lines, e.g. '{\"max_tokens\": 64}'"
    )
    parser.add_argument(
        "--max-in-flight", type=int, default=0, metavar="N", help="choices in the engine at once (0: 2 * --max-num-seqs)"
    )
    parser.add_argument("--chat-template", default="", metavar="FILE", help="Jinja chat template in place of the model's")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_engine_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    if config.parallel.world_size > 1:
        raise ConfigError("dp, tp: the batch runner is one process on one device; use the server for several")
    try:
        defaults = json.loads(args.defaults)
    except ValueError as error:
        raise ConfigError(f"--defaults: is not JSON: {error}") from error
    if not isinstance(defaults, dict):
        raise ConfigError("--defaults: must be a JSON object of body fields")
    check_defaults(defaults)
    if args.max_in_flight < 0:
        raise ConfigError(f"--max-in-flight: must be at least 0, got {args.max_in_flight}")
    if not args.input.is_file():
        raise ConfigError(f"--input {args.input}: no such file, or no regular one; it is read more than once")
    if args.output.exists() and args.output.samefile(args.input):
        raise ConfigError("--output: is the input file")
    output = OutputFile(args.output)
    known = [output.has(line) for line in read_lines(args.input)]
    todo, finished = known.count(False), len(output.done)
    if known.count(True) < finished:
        raise ConfigError(f"--output {args.output}: has records of lines that the input lacks; choose another file")
    if not todo:
        print(f"{args.output}: all {finished} lines are done")
        return 0
    from engine.llm import build_core  # only now: torch and the model take seconds

    model = ServedModel.load(
        resolve_model(config.model, weights=False),
        name=config.api_name,
        max_model_len=config.max_model_len,
        chat_template=args.chat_template,
    )
    engine, info = build_core(config)
    model.max_model_len = info.max_model_len
    in_flight = args.max_in_flight or 2 * config.scheduler.max_num_seqs
    if queue := config.scheduler.max_queued_requests:
        in_flight = min(in_flight, queue)
    started = time.monotonic()
    with tqdm(
        total=todo + finished, initial=finished, desc="Lines", unit="line", disable=args.quiet, dynamic_ncols=True
    ) as progress:
        runner = BatchRunner(engine, model, output, defaults=defaults, max_in_flight=in_flight, progress=progress)

        def remaining() -> Iterator[InputLine]:
            for line in read_lines(args.input):
                if output.has(line):
                    runner.remember(line)
                else:
                    yield line

        totals = runner.run(remaining())
    seconds = time.monotonic() - started
    output.close()
    print(
        f"{args.output}: {totals.answered} lines answered, {totals.refused} refused, {finished} done before; "
        f"{totals.output_tokens} tokens in {seconds:.1f} s ({totals.output_tokens / seconds:.0f} tokens/s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
