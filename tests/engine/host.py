"""A scheduler, its blocks and a fake device, wired together for host tests."""

from __future__ import annotations

from typing import Any

from engine.block_manager import BLOCK_SIZE, BlockManager
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.messages import AddRequest, RequestFailed, TokenOutput
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.engine.fake_device import VOCAB, FakeDevice, expected

EOS = VOCAB - 1


def prompt(length: int, family: int = 0) -> list[int]:
    """Prompts of one family are prefixes of each other."""
    return [(family * 7 + position * position + position // BLOCK_SIZE) % VOCAB for position in range(length)]


def request(request_id: str, length: int = 5, max_tokens: int | None = 4, *, family: int = 0, **fields: Any) -> AddRequest:
    """Fields of AddRequest go there, all others to SamplingParams."""
    own = {name: fields.pop(name) for name in ("eos_token_ids", "priority", "salt", "arrival") if name in fields}
    params = SamplingParams(max_tokens=max_tokens, **fields)
    return AddRequest(request_id, prompt(length, family), params, **{"arrival": 0.0, **own})


class Host:
    """Collects every output by request and checks that nothing follows a terminal message."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_model_len: int = 2048,
        num_drafts: int = 0,
        asynchronous: bool = False,
        prefix_cache: bool = True,
        **config: Any,
    ) -> None:
        self.config = SchedulerConfig(**config)
        self.limit = min(max_model_len, num_blocks * BLOCK_SIZE)
        self.blocks = BlockManager(num_blocks, prefix_cache)
        self.scheduler = Scheduler(
            self.config,
            self.blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            num_speculative_tokens=num_drafts,
            seed=0,
        )
        self.device = FakeDevice(num_blocks, self.config, limit=self.limit, num_drafts=num_drafts)
        self.core = EngineCore(self.scheduler, self.device, asynchronous=asynchronous)
        self.messages: dict[str, AddRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOutput | RequestFailed] = {}
        self.prompt_logprobs: dict[str, list[Any]] = {}
        self.scheduled: dict[str, float] = {}

    def add(self, *messages: AddRequest) -> None:
        for message in messages:
            self.core.add(message)
            self.messages[message.request_id] = message
            self.tokens[message.request_id] = []

    def abort(self, request_id: str, reason: str = "abort") -> TokenOutput | None:
        output = self.core.abort(request_id, reason)
        if output is not None:
            self._take(output)
        return output

    def step(self) -> list[TokenOutput | RequestFailed]:
        outputs = self.core.step()
        for output in outputs:
            self._take(output)
        self.blocks.check_invariants()
        for _, waiting in self.scheduler._waiting:
            assert waiting.row == -1 and not waiting.block_ids and not waiting.decoding
            assert waiting.num_computed == waiting.num_pending == waiting.num_registered == 0
        return outputs

    def run(self, most_steps: int = 60_000) -> None:
        while self.core.has_work:
            self.step()
            most_steps -= 1
            assert most_steps, "no end in sight"
        assert self.blocks.num_used == 0

    def _take(self, output: TokenOutput | RequestFailed) -> None:
        name = output.request_id
        assert name not in self.ends, f"{name} got a message behind its terminal one"
        if isinstance(output, RequestFailed):
            self.ends[name] = output
            return
        tokens = self.tokens[name]
        first = not tokens
        tokens += output.token_ids
        wants = self.messages[name].params
        assert output.num_output_tokens == len(tokens)
        assert output.num_prompt_tokens == len(self.messages[name].prompt_token_ids)
        if wants.logprobs is not None and output.token_ids:
            assert output.logprobs is not None
            assert [entry.token_id for entry in output.logprobs] == output.token_ids
        if output.prompt_logprobs is not None:
            assert first and name not in self.prompt_logprobs
            self.prompt_logprobs[name] = output.prompt_logprobs
        if first and output.token_ids:
            self.scheduled[name] = output.scheduled_time
        if output.finish_reason is not None:
            self.ends[name] = output
            assert output.scheduled_time == self.scheduled.get(name, output.scheduled_time)

    def check(self, *names: str) -> None:
        """These requests (all, if none is named) ran to the end they would reach alone."""
        for name in names or self.messages:
            message = self.messages[name]
            end = self.ends[name]
            assert isinstance(end, TokenOutput), end
            assert (self.tokens[name], end.finish_reason, end.stop_reason) == expected(message, self.limit)
            assert end.num_output_tokens == len(self.tokens[name])
            if message.params.prompt_logprobs is not None:
                assert [entry and entry.token_id for entry in self.prompt_logprobs[name]] == [
                    None,
                    *message.prompt_token_ids[1:],
                ]
