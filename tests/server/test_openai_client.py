"""The openai package, unmodified, against the server: sync, async, streams, tools, structured output, errors."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.server.running import Running, running
from tests.server.test_api import CALL, END, TOOLS, USER


def client_of(server: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{server.address[0]}:{server.address[1]}/v1", api_key=key, max_retries=0)


async def test_chat_and_completions() -> None:
    async with running(script="Peace be with you." + END) as server:
        client = client_of(server)
        assert [model.id async for model in client.models.list()] == ["demo"]
        chat = await client.chat.completions.create(model="demo", messages=USER, temperature=0.5, seed=1)
        assert chat.choices[0].message.content == "Peace be with you." and chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
        text = await client.completions.create(model="demo", prompt="x", max_tokens=3, logprobs=1, echo=True)
        assert text.choices[0].logprobs is not None and text.choices[0].text.startswith("x")
        stream = await client.chat.completions.create(
            model="demo", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "Peace be with you."
        assert chunks[-1].usage == chat.usage
        extras = await client.chat.completions.create(
            model="demo", messages=USER, max_tokens=2, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True}
        )
        assert extras.usage is not None and extras.usage.completion_tokens == 2


async def test_sync_client() -> None:
    async with running(script="Amen" + END) as server:

        def ask() -> str:
            url = f"http://{server.address[0]}:{server.address[1]}/v1"
            with openai.OpenAI(base_url=url, api_key="none") as client:
                stream = client.chat.completions.create(model="demo", messages=USER, stream=True)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert await asyncio.to_thread(ask) == "Amen"


async def test_tools() -> None:
    async with running(script=CALL + END) as server:
        client = client_of(server)
        whole = await client.chat.completions.create(model="demo", messages=USER, tools=TOOLS)
        (call,) = whole.choices[0].message.tool_calls or []
        async with client.chat.completions.stream(model="demo", messages=USER, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls or []
        assert streamed.function.name == call.function.name == "weather"  # type: ignore[union-attr]
        assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)  # type: ignore[union-attr]
        answered = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "warm"},
        ]
        await client.chat.completions.create(model="demo", messages=answered, tools=TOOLS, max_tokens=2)


async def test_structured_output_reaches_the_engine() -> None:
    """The engine's part (masks) is tested with the sampler; here the client's request becomes a checked grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    async with running(script='{"a": 1}' + END) as server:
        client = client_of(server)
        answer = await client.chat.completions.create(
            model="demo",
            messages=USER,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
        )
        assert json.loads(answer.choices[0].message.content or "") == {"a": 1}
        assert server.replicas[0].received[0].params.grammar is not None
        await client.chat.completions.create(model="demo", messages=USER, response_format={"type": "json_object"})


async def test_errors_are_the_clients_own_types() -> None:
    async with running(api_keys=("k",), replicas={"queue_limit": 0}) as server:
        with pytest.raises(openai.AuthenticationError):
            await client_of(server, "wrong").models.list()
        client = client_of(server, "k")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="demo", messages=USER, max_tokens=10**6)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4", messages=USER)
        with pytest.raises(openai.InternalServerError) as full:
            await client.chat.completions.create(model="demo", messages=USER)
        assert full.value.status_code == 503


async def test_engine_failure_mid_stream_raises() -> None:
    async with running(heartbeat_s=1.0, replicas={"step_s": 0.02}) as server:
        stream = await client_of(server).completions.create(model="demo", prompt="x", max_tokens=500, stream=True)
        await anext(aiter(stream))
        server.replicas[0].stop()
        with pytest.raises(openai.APIError, match="silent"):
            async for _ in stream:
                pass
