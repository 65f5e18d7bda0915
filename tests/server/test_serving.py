"""From the engine's outputs to a client: outputs that pile up, and what the figures say of the way."""

from __future__ import annotations

import msgspec
import pytest

from engine.messages import TokenLogprob, TokenOutput
from engine.openai_responses import Choice
from engine.openai_types import CompletionRequest, parse_request
from engine.served_model import ServedModel
from server.serving import _joined
from tests.server.running import demo_folder, running

TEXT = "In the beginning was the word, and the word was good."
MODEL = ServedModel.load(demo_folder(), name="demo", max_model_len=512)


@pytest.mark.parametrize(
    "asked", [{}, {"stop": ["word, and"]}, {"stop": ["the wor"], "include_stop_str_in_output": True}, {"logprobs": 1}]
)
@pytest.mark.parametrize("group", [2, 5, 100])
def test_outputs_that_piled_up_say_what_they_say_one_by_one(asked: dict, group: int) -> None:
    work = MODEL.completion(parse_request(CompletionRequest, {"prompt": "x", "max_tokens": 100} | asked))
    ids = MODEL.tokenizer.encode(TEXT, add_special_tokens=False)
    scored = [[TokenLogprob(i, -0.5, 1, [(i, -0.5)])] if "logprobs" in asked else None for i in ids]
    outputs = [TokenOutput("r", [i], logprobs=score, num_cached_tokens=1) for i, score in zip(ids, scored, strict=True)]
    outputs[-1] = msgspec.structs.replace(outputs[-1], finish_reason="length")
    one_by_one, joined = Choice(MODEL, work, 0), Choice(MODEL, work, 0)
    for output in outputs:
        one_by_one.push(output)
    for start in range(0, len(outputs), group):
        joined.push(_joined(outputs[start : start + group]))
    assert joined.result() == one_by_one.result()
    assert joined.stream.num_cached_tokens == one_by_one.stream.num_cached_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_one_time_to_first_token_a_choice(stream: bool) -> None:
    """Streams count it when its chunk was written, whole answers when the token came; only streams have a way to a socket."""
    async with running() as server:
        body = {"prompt": "x", "max_tokens": 5, "n": 3, "temperature": 1.0}
        if stream:
            await server.stream("/v1/completions", **body)
        else:
            await server.post("/v1/completions", **body)
        assert await server.metric("time_to_first_token_seconds_count") == 3
        assert await server.metric("generation_tokens_total") == 15
        assert (await server.metric("frontend_delivery_seconds_count") > 0) is stream
