"""From a request body to its response: work for the engine, its tokens as one JSON body or as server-sent events.

A client that leaves, mid-stream or before its first token, aborts its choices; the response then ends like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError, RequestRejected
from engine.messages import TokenOutput
from engine.openai_responses import Choice, chunk_body, error_body, response_body, usage
from engine.openai_types import parse_request
from engine.served_model import ServedModel, Work
from server.frontend import EngineClient
from server.generation import Generation

Result = TypeVar("Result")
RETRY_AFTER_S = 1
_INLINE_BODY_BYTES = 4096  # larger ones are parsed and tokenized in a thread, so that other streams go on
_SLOW_FIELDS = (b"response_format", b"structured_outputs", b"guided_", b"tool")  # a grammar is compiled
_EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_NO_ENTRIES = b'"choices":[]'  # no text of a body can hold it: quotes inside a JSON string are escaped
_json = msgspec.json.Encoder().encode


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _json(content)


def _status_and_body(error: EngineError) -> tuple[int, dict[str, Any]]:
    if not isinstance(error, RequestRejected):
        error = RequestRejected(str(error), code="internal")
    return error_body(error)


def rejection(error: EngineError) -> JsonResponse:
    """The response to a request that was refused, or that broke with the engine."""
    status, body = _status_and_body(error)
    return JsonResponse(body, status, {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None)


async def read_json(request: Request) -> bytes:
    """The body. Raises RequestRejected unless it is declared as JSON: a page of another site cannot send that unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRejected(f"Content-Type must be application/json, got {kind or 'none'}", code="unsupported_media_type")
    return await request.body()


async def prepare(work: Callable[[], Result], body: bytes) -> Result:
    """Run `work`, in a thread where it may take long enough to be felt by other requests."""
    if len(body) <= _INLINE_BODY_BYTES and not any(name in body for name in _SLOW_FIELDS):
        return work()
    return await asyncio.to_thread(work)


class Serving:
    """Runs requests of one model on the engine."""

    def __init__(self, model: ServedModel, client: EngineClient) -> None:
        self.model, self.client = model, client

    async def respond(self, request: Request, kind: type[Any], to_work: Callable[[Any], Work]) -> Response:
        """kind: pydantic type of the body; to_work: ServedModel.completion, .chat or .generate"""
        self.client.refuse_unless_ready()
        body = await read_json(request)
        state = request.scope["state"]
        work = await prepare(lambda: to_work(parse_request(kind, body)), body)
        adds = work.add_requests(state["arrival"])
        n = work.params.n
        prompts = [adds[first : first + n] for first in range(0, len(adds), n)]
        max_tokens = work.params.max_tokens or self.model.max_model_len
        generations = self.client.submit(work.request_id, prompts, max_tokens, work.dp_rank)
        metrics = self.client.metrics
        for prompt in range(0, len(generations), n):
            metrics.params(generations[prompt].dp_rank, n, max_tokens)
        run = _Run(self.model, self.client, work, generations, state["arrival"])
        state["notes"] |= {"id": work.request_id, "replica": generations[0].dp_rank, "prompt_tokens": run.prompt_tokens}
        return _Generated(run)


class _Run:
    """One request while it runs."""

    def __init__(
        self, model: ServedModel, client: EngineClient, work: Work, generations: list[Generation], created: float
    ) -> None:
        self.model, self.client, self.work, self.created = model, client, work, created
        self.pairs = [(generation, Choice(model, work, index)) for index, generation in enumerate(generations)]
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in work.prompts)

    @property
    def choices(self) -> list[Choice]:
        return [choice for _, choice in self.pairs]

    def abort(self) -> None:
        for generation, _ in self.pairs:
            self.client.abort(generation)

    async def pump(self, generation: Generation, choice: Choice, events: _Events | None) -> None:
        """Take a choice's tokens until it has finished, and stream them. A failure aborts the other choices."""
        client, stream = self.client, choice.stream
        before = 0
        try:
            while stream.finish_reason is None:
                outputs = await generation.outputs()
                arrived = generation.arrived_at
                entry = choice.push(_joined(outputs) if len(outputs) > 1 else outputs[0])
                if choice.stopped_by_string:
                    client.stop(generation, stream.num_output_tokens)
                count = 0 if self.work.prompt_only else stream.num_output_tokens
                if events is None:
                    client.delivered(generation, count - before)
                elif entry is not None:
                    await events.deliver(entry)
                    client.delivered(generation, count - before, arrived)
                else:
                    continue  # counted with the chunk that will carry them
                before = count
        except EngineError:
            self.abort()
            raise

    async def all(self, events: _Events | None) -> None:
        """Pump every choice, each in a task: waking one must not climb through the layers above a request. If one fails,
        the first failure is raised when all have ended."""
        tasks = [asyncio.create_task(self.pump(*pair, events)) for pair in self.pairs]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def note(self, scope: Scope, failure: EngineError | None) -> None:
        """What the access log says about the end."""
        reasons = {choice.stream.finish_reason or "error" for choice in self.choices}
        scope["state"]["notes"] |= {
            "output_tokens": sum(choice.stream.num_output_tokens for choice in self.choices),
            "cached_tokens": self.choices[0].stream.num_cached_tokens,
            "finish": ",".join(sorted(reasons)),
            "error": str(failure) if failure is not None else None,
        }


class _Generated(Response):
    """The response of a run, as one body or as server-sent events.

    A client that disconnects aborts the run, whether or not anything was sent yet. A stream's headers wait for its first
    tokens, so that a refusal still gets its status code.
    """

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self.run
        watcher = asyncio.create_task(self._watch(receive))
        stream = _Events(run, send, scope["state"]["send"]) if run.work.stream else None
        failure: EngineError | None = None
        try:
            await run.all(stream)
        except EngineError as error:
            failure = error
        finally:
            watcher.cancel()
            run.abort()  # no effect on what has ended; all there is to do when the server cancels this task
        run.note(scope, failure)
        if stream is not None and (stream.started or failure is None):
            await stream.finish(failure)
        elif failure is not None:
            await rejection(failure)(scope, receive, send)
        else:
            await JsonResponse(response_body(run.model, run.work, run.choices, run.created))(scope, receive, send)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.run.abort()


class _Events:
    """A run's chunks on their way to the socket.

    start: takes the response's headers, through every layer; send: takes its body, to the server itself
    """

    def __init__(self, run: _Run, start: Send, send: Send) -> None:
        self._run, self._start, self._send = run, start, send
        self._head, _, self._tail = _event(chunk_body(run.model, run.work, [], run.created)).partition(_NO_ENTRIES)
        self.started = False

    async def deliver(self, entry: dict[str, Any]) -> None:
        """Send a choice entry as a chunk."""
        await self._write(self._chunk(entry), more=True)

    async def finish(self, failure: EngineError | None) -> None:
        """Usage if it was asked for, or the error that ended the stream; then the end mark."""
        run = self._run
        last = b""
        if failure is not None:
            last = _event(_status_and_body(failure)[1])
        elif run.work.include_usage:
            last = _event(chunk_body(run.model, run.work, [], run.created, usage(run.work, run.choices)))
        await self._write(last + b"data: [DONE]\n\n", more=False)

    async def _write(self, events: bytes, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._start({"type": "http.response.start", "status": 200, "headers": list(_EVENT_HEADERS)})
            first = [chunk for choice in self._run.choices if (chunk := choice.first_chunk()) is not None]
            events = b"".join(map(self._chunk, first)) + events
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    def _chunk(self, entry: dict[str, Any]) -> bytes:
        run = self._run
        if run.work.continuous_usage:
            return _event(chunk_body(run.model, run.work, [entry], run.created, usage(run.work, run.choices)))
        return b'%b"choices":[%b]%b' % (self._head, _json(entry), self._tail)


def _joined(outputs: list[TokenOutput]) -> TokenOutput:
    """Outputs of a request that piled up while it waited, as one: a busy server sends fewer, larger chunks."""
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return msgspec.structs.replace(
        outputs[-1],
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
    )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json(body) + b"\n\n"
