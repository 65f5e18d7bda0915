"""Engine outputs as OpenAI response bodies: one choice's stream of chunks, and its whole result, from the same state.

Server and offline runner both feed a request's TokenOutputs to its choices; `chunk` bodies and `result` bodies agree by
construction. Bodies are plain dicts.
"""

from __future__ import annotations

import time
from typing import Any

from engine.chat_format import ChatParser, ChatPiece
from engine.errors import RequestRejected
from engine.messages import TokenOutput
from engine.openai_logprobs import CompletionLogprobs, chat_logprobs, ranked
from engine.output import OutputDelta, OutputStream, TokenText
from engine.sampling_params import SamplingParams
from engine.served_model import ServedModel, Work
from engine.tool_calls import ForcedCallParser, ToolCallDelta

HTTP_STATUS = {
    "model_not_found": 404,
    "unsupported_media_type": 415,
    "queue_full": 503,
    "shutting_down": 503,
    "not_ready": 503,
    "internal": 500,
}
ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    415: "invalid_request_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


class Choice:
    """One choice of a request while it is generated. Push every TokenOutput; None comes back when there is nothing to send.

    stopped_by_string: after a push, whether the engine must be told to stop (AbortRequest with reason "stop")
    """

    def __init__(self, model: ServedModel, work: Work, index: int) -> None:
        prompt = work.prompts[index // work.params.n]
        self.index = index
        self.stopped_by_string = False
        self._work = work
        self._model = model
        self._prompt_ids = prompt.token_ids
        self._begun = False  # a completion's first chunk also carries what echo asks for
        self._logged = 0  # characters of the tokens in a completion's logprobs so far; held text is ahead of them, or behind
        self._pending = OutputDelta()  # tokens whose text a parser still holds
        self._parser: ChatParser | None = None
        self._message = _Message()
        params: SamplingParams = work.params
        keep = frozenset[int]()
        if work.kind == "chat":
            forced = None if work.forced_call is None else ForcedCallParser(work.forced_call or None)
            self._parser = ChatParser(model.chat_format, prompt.text or "", work.tools, forced)
            keep = model.visible_ids[bool(work.tools)]
        self.stream = OutputStream(
            model.tokenizer, params, prompt.token_ids, keep=keep, tokens_with_text=work.kind != "generate"
        )

    # ---- streaming

    def first_chunk(self) -> dict[str, Any] | None:
        """What a stream begins with before any token: the role in chat, nothing elsewhere."""
        if self._work.kind == "chat":
            first = {
                "index": self.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            return first | ({"prompt_token_ids": self._prompt_ids} if self._work.return_token_ids else {})
        return None

    def push(self, output: TokenOutput) -> dict[str, Any] | None:
        """The choice entry of the next chunk, None if there is nothing to send yet. Raises RequestRejected for a token id
        out of range: the caller ends this request only."""
        delta = self.stream.push(output)
        self.stopped_by_string = delta.stopped_by_string
        if not delta:
            return None
        if self._work.prompt_only:
            delta = OutputDelta(prompt_logprobs=delta.prompt_logprobs, finish_reason="length" if delta.finish_reason else None)
        if self._work.kind == "chat":
            return self._chat_chunk(delta)
        if self._work.kind == "generate":
            return self._generate_chunk(delta)
        first, self._begun = not self._begun, True
        return self._completion_chunk(delta, first)

    def _chat_chunk(self, delta: OutputDelta) -> dict[str, Any] | None:
        assert self._parser is not None
        piece = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            rest = self._parser.finish()
            piece = ChatPiece(piece.reasoning + rest.reasoning, piece.content + rest.content, piece.calls + rest.calls)
        self._message.add(piece)
        delta = self._with_pending(delta)
        if not piece and delta.finish_reason is None:
            self._pending = delta
            return None
        body: dict[str, Any] = {}
        if piece.reasoning:
            body["reasoning_content"] = piece.reasoning
        if piece.content:
            body["content"] = piece.content
        if piece.calls:
            body["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return {
            "index": self.index,
            "delta": body,
            "logprobs": chat_logprobs(delta.logprobs),
            "finish_reason": self._finish_reason(delta.finish_reason),
            **self._extras(delta),
        }

    def _with_pending(self, delta: OutputDelta) -> OutputDelta:
        held, self._pending = self._pending, OutputDelta()
        delta.token_ids = held.token_ids + delta.token_ids
        if held.logprobs:
            delta.logprobs = held.logprobs + (delta.logprobs or [])
        delta.prompt_logprobs = held.prompt_logprobs or delta.prompt_logprobs
        return delta

    def _completion_chunk(self, delta: OutputDelta, first: bool) -> dict[str, Any]:
        text, asked = delta.text, self._work.params.logprobs
        if not self._work.echo and asked is None:
            return self._completion_entry(delta, text, None, first)
        scores = CompletionLogprobs(asked)
        if self._work.echo and first:
            pieces = self.stream.prompt_pieces()
            text = "".join(pieces) + text
            scores.add_prompt(pieces, delta.prompt_logprobs)
        scores.add(delta.logprobs)
        offset, self._logged = self._logged, self._logged + scores.num_characters
        return self._completion_entry(delta, text, scores.body(offset), first)

    def _completion_entry(self, delta: OutputDelta, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        entry = {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            **self._extras(delta),
        }
        if first and self._work.return_token_ids:
            entry["prompt_token_ids"] = self._prompt_ids
        return entry

    def _generate_chunk(self, delta: OutputDelta) -> dict[str, Any]:
        body = {
            "index": self.index,
            "token_ids": delta.token_ids,
            "logprobs": chat_logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return body | ({"text": delta.text} if self._work.return_text else {}) | self._prompt_scores(delta.prompt_logprobs)

    # ---- whole results

    def result(self) -> dict[str, Any]:
        """The choice entry of the response; valid once the choice has finished."""
        stream, work = self.stream, self._work
        whole = OutputDelta(
            text="" if work.prompt_only else stream.text,
            token_ids=[] if work.prompt_only else stream.token_ids,
            logprobs=None if work.prompt_only else stream.logprobs,
            prompt_logprobs=stream.prompt_logprobs,
            finish_reason="length" if work.prompt_only and stream.finish_reason == "stop" else stream.finish_reason,
            stop_reason=None if work.prompt_only else stream.stop_reason,
        )
        if work.kind == "generate":
            return self._generate_chunk(whole)
        if work.kind == "chat":
            return {
                "index": self.index,
                "message": self._message.body(),
                "logprobs": chat_logprobs(whole.logprobs),
                "finish_reason": self._finish_reason(whole.finish_reason),
                **self._extras(whole),
                **({"prompt_token_ids": self._prompt_ids} if work.return_token_ids else {}),
            }
        pieces = stream.prompt_pieces() if work.echo else []
        scores = CompletionLogprobs(work.params.logprobs)
        scores.add_prompt(pieces, whole.prompt_logprobs)
        scores.add(whole.logprobs)
        return self._completion_entry(whole, "".join(pieces) + whole.text, scores.body(0), first=True)

    def _finish_reason(self, reason: str | None) -> str | None:
        assert self._parser is not None
        called = self._parser.num_calls and not self._work.forced_call  # a function forced by name ends with "stop"
        return "tool_calls" if reason == "stop" and called else reason

    def _extras(self, delta: OutputDelta) -> dict[str, Any]:
        extras: dict[str, Any] = {"stop_reason": delta.stop_reason}
        if self._work.return_token_ids:
            extras["token_ids"] = delta.token_ids
        if delta.prompt_logprobs is not None:
            extras |= self._prompt_scores(delta.prompt_logprobs)
        return extras

    def _prompt_scores(self, entries: list[TokenText | None] | None) -> dict[str, Any]:
        if not self._work.show_prompt_logprobs or entries is None:
            return {}
        return {"prompt_logprobs": [None if entry is None else ranked(entry) for entry in entries]}


class _Message:
    """A chat answer put together from the pieces its stream would send."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, piece: ChatPiece) -> None:
        self._reasoning.append(piece.reasoning)
        self._content.append(piece.content)
        for call in piece.calls:
            if call.name is not None:
                self._calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
            self._calls[call.index]["function"]["arguments"] += call.arguments

    def body(self) -> dict[str, Any]:
        content = "".join(self._content)
        body: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if reasoning := "".join(self._reasoning):
            body["reasoning_content"] = reasoning
        return body | ({"tool_calls": self._calls} if self._calls else {})


# ---- bodies


def response_body(model: ServedModel, work: Work, choices: list[Choice], created: float) -> dict[str, Any]:
    """The whole answer of a request that does not stream."""
    kinds = {"completion": "text_completion", "chat": "chat.completion", "generate": "token_generation"}
    return {
        "id": work.request_id,
        "object": kinds[work.kind],
        "created": int(created),
        "model": model.name,
        "choices": [choice.result() for choice in choices],
        "usage": usage(work, choices),
    }


def chunk_body(
    model: ServedModel, work: Work, entries: list[dict[str, Any]], created: float, totals: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One chunk of a stream. With include_usage, usage is null in all chunks but the last, whose entries are empty."""
    kinds = {"completion": "text_completion", "chat": "chat.completion.chunk", "generate": "token_generation"}
    body = {
        "id": work.request_id,
        "object": kinds[work.kind],
        "created": int(created),
        "model": model.name,
        "choices": entries,
    }
    return body | ({"usage": totals} if work.include_usage or totals is not None else {})


def usage(work: Work, choices: list[Choice]) -> dict[str, Any]:
    """Token counts: each prompt once, the outputs of all choices; cached tokens are those of each prompt's first choice."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in work.prompts)
    output_tokens = 0 if work.prompt_only else sum(choice.stream.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.stream.num_cached_tokens for choice in choices[:: work.params.n])
        },
    }


def error_body(error: RequestRejected) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body in OpenAI's error shape) of a refused or failed request."""
    status = HTTP_STATUS.get(error.code, 400)
    return status, {"error": {"message": str(error), "type": ERROR_TYPES[status], "param": error.param, "code": error.code}}


def model_list(model: ServedModel, created: float | None = None) -> dict[str, Any]:
    """Body of the answer to /v1/models."""
    entry = {
        "id": model.name,
        "object": "model",
        "created": int(time.time() if created is None else created),
        "owned_by": "snapmla",
        "max_model_len": model.max_model_len,
    }
    return {"object": "list", "data": [entry]}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
