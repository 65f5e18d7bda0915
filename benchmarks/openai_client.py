"""The openai package, unmodified, against a server with the bundled model: every way of asking, and both sides' counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai

from benchmarks.serving import scrape

MESSAGES: Any = [{"role": "user", "content": "Tell me of the king and his servants."}]
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 40}, "by": {"enum": ["sea", "land"]}},
    "required": ["days", "by"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "journey", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [{"type": "function", "function": {"name": "journey", "parameters": SCHEMA}}]
FORCED: Any = {"type": "function", "function": {"name": "journey"}}
ASKED: Any = {"model": "demo", "temperature": 0, "max_tokens": 64}


class Asking:
    """Chat requests, each whole and as a stream, and the usage the server said they had."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        self.usages: list[Any] = []

    def chat(self, **more: Any) -> Any:
        """The message of a whole answer, which that of the stream must equal."""
        whole = self._client.chat.completions.create(messages=MESSAGES, **ASKED, **more)
        asked = ASKED | more | {"stream_options": {"include_usage": True}}
        with self._client.chat.completions.stream(messages=MESSAGES, **asked) as stream:
            final = stream.get_final_completion()
        self.usages += [whole.usage, final.usage]
        first, second = whole.choices[0], final.choices[0]
        assert first.finish_reason == second.finish_reason
        assert (first.message.content or "") == (second.message.content or "")  # a stream begins with an empty text
        calls = [[(c.function.name, c.function.arguments) for c in m.message.tool_calls or []] for m in (first, second)]
        assert calls[0] == calls[1]
        return first.message

    def complete(self, **more: Any) -> str:
        """The text of a completion, which that of the stream must equal."""
        whole = self._client.completions.create(prompt="In the beginning", **ASKED, **more)
        chunks = list(self._client.completions.create(prompt="In the beginning", stream=True, **ASKED, **more))
        assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks)
        self.usages += [whole.usage, whole.usage]
        return whole.choices[0].text

    def refused(self, kind: type[openai.APIError], **more: Any) -> None:
        try:
            self._client.chat.completions.create(messages=MESSAGES, **ASKED | more)
        except kind:
            return
        raise AssertionError(f"{more} was answered")


def openai_python(port: int) -> dict[str, Any]:
    """What was asked and that both sides counted the same: [client, server] of every count.

    Needs a server whose tokens do not depend on the batch (the exact cache). Raises AssertionError where a stream and a whole
    answer differ, where a forced format is not kept, or where a wrong request is answered.
    """
    where: Any = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "none", "max_retries": 0}
    before = scrape(port)
    with openai.OpenAI(**where) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        asking = Asking(client)
        asking.complete(logprobs=2)
        plain = asking.chat()
        formatted = json.loads(asking.chat(response_format=FORMAT).content)
        (call,) = asking.chat(tools=TOOLS, tool_choice=FORCED).tool_calls
        called = json.loads(call.function.arguments)
        for value in (formatted, called):
            assert 1 <= value["days"] <= 40 and value["by"] in ("sea", "land"), value
        asking.refused(openai.NotFoundError, model="another")
        asking.refused(openai.BadRequestError, max_tokens=10**6)

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(**where) as client:
            return await asyncio.gather(*(client.chat.completions.create(messages=MESSAGES, **ASKED) for _ in range(8)))

    answers = asyncio.run(together())
    assert {answer.choices[0].message.content for answer in answers} == {plain.content}
    usages = asking.usages + [answer.usage for answer in answers]
    after = scrape(port)

    def served(name: str) -> int:
        return int(after[name] - before.get(name, 0.0))

    return {
        "package": openai.__version__,
        "requests": [len(usages), served("request_success_total")],
        "prompt_tokens": [sum(usage.prompt_tokens for usage in usages), served("prompt_tokens_total")],
        "output_tokens": [sum(usage.completion_tokens for usage in usages), served("generation_tokens_total")],
        "structured": formatted,
        "called": {call.function.name: called},
    }
