"""`python -m engine.offline --model M --input in.jsonl --output out.jsonl`: a batch file through the engine.

A line is a plain prompt ("text", {"prompt": ...} or {"messages": ...} with any sampling field) or an OpenAI batch line
({"custom_id", "method", "url", "body"}) for completions or chat completions. Each gives one output line, written as it
finishes; a bad line gives one with an error. Started again after any kind of end, the same command goes on: lines whose
output is complete are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from tqdm import tqdm

from engine.arguments import add_engine_arguments, engine_config
from engine.batch_file import InputLine, OutputFile, Request, read_defaults, read_lines
from engine.errors import ConfigError, RequestRejected
from engine.hub import resolve_model
from engine.messages import AddRequest, RequestFailed, TokenOutput
from engine.openai_responses import Choice, error_body, response_body
from engine.openai_types import CompletionRequest, parse_request
from engine.served_model import ServedModel, Work


class Engine(Protocol):
    """What the runner needs of engine.core.EngineCore."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_id: str, reason: str = "abort") -> Any: ...

    def step(self) -> list[TokenOutput | RequestFailed]: ...


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
    defaults = read_defaults(args.defaults)
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
