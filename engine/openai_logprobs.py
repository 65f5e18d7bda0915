"""Log probabilities in the shapes of the OpenAI API: parallel lists for completions, one list of tokens for chat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.output import TokenText

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class CompletionLogprobs:
    """The parallel lists of completion logprobs; None where they were not asked for."""

    def __init__(self, asked: int | None) -> None:
        self._asked = asked
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []

    def add_prompt(self, pieces: list[str], scored: Sequence[TokenText | None] | None) -> None:
        if self._asked is not None and pieces:
            self._extend(pieces, scored or [None] * len(pieces))

    def add(self, scored: list[TokenText] | None) -> None:
        if self._asked is not None and scored:
            self._extend([entry.text for entry in scored], scored)

    def _extend(self, texts: list[str], scored: Sequence[TokenText | None]) -> None:
        for text, entry in zip(texts, scored):
            self._tokens.append(text)
            self._logprobs.append(None if entry is None else finite(entry.logprob))
            if entry is None:
                self._top.append(None)
                continue
            # The chosen token under the same spelling as in `tokens`, so that clients can compare the two.
            own = {text: finite(entry.logprob)}
            others = {token: finite(value) for token_id, token, _, value in entry.top if token_id != entry.token_id}
            self._top.append(dict(sorted((others | own).items(), key=lambda item: -item[1])))

    @property
    def num_characters(self) -> int:
        return sum(map(len, self._tokens))

    def body(self, offset: int) -> dict[str, Any] | None:
        """offset: characters of the choice's tokens before these."""
        if self._asked is None:
            return None
        offsets = []
        for token in self._tokens:
            offsets.append(offset)
            offset += len(token)
        return {"tokens": self._tokens, "token_logprobs": self._logprobs, "top_logprobs": self._top, "text_offset": offsets}


def chat_logprobs(entries: list[TokenText] | None) -> dict[str, Any] | None:
    """A list of tokens, each with its bytes and alternatives; None where they were not asked for."""
    if entries is None:
        return None
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": finite(entry.logprob),
                "bytes": list(entry.raw),
                "top_logprobs": [
                    {"token": token, "logprob": finite(value), "bytes": list(raw)} for _, token, raw, value in entry.top
                ],
            }
            for entry in entries
        ]
    }


def ranked(entry: TokenText) -> dict[str, Any]:
    """Prompt logprobs as users of vLLM know them: token id -> logprob, rank and text, the token itself included."""
    found = {
        str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": token}
        for rank, (token_id, token, _, value) in enumerate(entry.top, 1)
    }
    return found | {str(entry.token_id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.token}}


def finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST_LOGPROB
