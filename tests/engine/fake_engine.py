"""An engine without a model: it answers each prompt with a given text, a few tokens a step. Same surface as EngineCore."""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import AddRequest, TokenLogprob, TokenOutput
from engine.tokenizer import Tokenizer


class FakeEngine:
    """answer: prompt ids -> text. Ends with the first end-of-sequence id of the request, or at max_tokens."""

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[list[int]], str], tokens_per_step: int = 1) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._tokens_per_step = tokens_per_step
        self._live: dict[str, tuple[AddRequest, list[int]]] = {}
        self._sent: dict[str, int] = {}
        self.aborted: list[tuple[str, str]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, request: AddRequest) -> None:
        ids = self._tokenizer.encode(self._answer(request.prompt_token_ids), add_special_tokens=False, allow_special=True)
        self._live[request.request_id] = (request, [*ids, request.eos_token_ids[0]])
        self._sent[request.request_id] = 0

    def abort(self, request_id: str, reason: str = "abort") -> None:
        if self._live.pop(request_id, None):
            self.aborted.append((request_id, reason))

    def step(self) -> list[TokenOutput]:
        outputs = []
        for request_id, (request, ids) in list(self._live.items()):
            start = self._sent[request_id]
            limit = min(len(ids), request.params.max_tokens or len(ids))
            end = min(start + self._tokens_per_step, limit)
            self._sent[request_id] = end
            reason = None
            if end == limit:
                reason = "stop" if limit == len(ids) else "length"
                del self._live[request_id]
            outputs.append(
                TokenOutput(
                    request_id,
                    ids[start:end],
                    finish_reason=reason,
                    logprobs=[scored(token) for token in ids[start:end]] if request.params.logprobs is not None else None,
                    prompt_logprobs=(
                        [None, *map(scored, request.prompt_token_ids[1:])]
                        if request.params.prompt_logprobs is not None and start == 0
                        else None
                    ),
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_cached_tokens=len(request.prompt_token_ids) // 2,
                )
            )
        return outputs


def scored(token_id: int) -> TokenLogprob:
    """A token that was the best but one."""
    return TokenLogprob(token_id, -1.5, 2, [(token_id + 1, -0.5), (token_id, -1.5)])
