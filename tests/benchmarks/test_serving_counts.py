"""The load generator counts the engine's tokens, whatever the stream's chunks look like."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.serving import one

CHUNKS = [  # (text, token ids): hidden by a parser, several at once, blanks, nothing new
    ("", [5]), ("", [6]), ("    ", [7, 7, 7]), ("the king", [8, 9]), ("", []),
]  # fmt: skip


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    for text, ids in CHUNKS:
        await asyncio.sleep(0.02)
        writer.write(b"data: " + json.dumps({"choices": [{"text": text, "token_ids": ids}]}).encode() + b"\n\n")
    usage = {"prompt_tokens": 11, "completion_tokens": 7}
    writer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    await writer.drain()
    writer.close()


def test_tokens_are_counted_by_ids_and_not_by_chunks() -> None:
    """Report B01, B02, B03, B04, B05: chunks of several tokens, of blanks, and of tokens that show no text."""

    async def run():
        async with await asyncio.start_server(_answer, "127.0.0.1", 0) as server:
            return await one(server.sockets[0].getsockname()[1], "prompt", 7)

    request = asyncio.run(run())
    assert len(request.tokens) == 7
    assert request.prompt_tokens == 11
    # The first token counts when it arrives, not when its text does; tokens of a chunk share its time.
    assert (
        request.tokens[0] < request.tokens[1] < request.tokens[2] == request.tokens[3] == request.tokens[4] < request.tokens[5]
    )
    mean = (request.tokens[-1] - request.tokens[0]) / (len(request.tokens) - 1)
    assert mean == pytest.approx(sum(b - a for a, b in zip(request.tokens, request.tokens[1:])) / 6)
