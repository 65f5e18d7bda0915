"""From sampled tokens to the text a user sees: detokenizing, stop strings and logprob strings, in one place.

LLM, offline runner and server all push a request's TokenOutputs through an OutputStream. A stop string may begin in one
token and end in another: text that could still become one is held back and released when it does not. Text, token ids,
logprobs and usage all end with the same token.
"""

from __future__ import annotations

import msgspec

from engine.messages import TokenLogprob, TokenOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import IncrementalDetokenizer, Tokenizer


class TokenText(msgspec.Struct, frozen=True):
    """One token with its logprob, ready for display.

    text: the part of the output text this token added (empty while a character is incomplete), so that the texts of all
        tokens join to the whole; token: the token on its own; top: the best alternatives as (id, token, bytes, logprob)
    """

    token_id: int
    text: str
    token: str
    raw: bytes
    logprob: float
    rank: int
    top: list[tuple[int, str, bytes, float]] = []


class OutputDelta(msgspec.Struct):
    """What one push added. Without text and unfinished it is empty: its tokens come with the next text.

    stopped_by_string: a stop string ended the request here, so the engine still has to be told (AbortRequest, "stop")
    prompt_logprobs: once, the first entry None
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenText] | None = None
    prompt_logprobs: list[TokenText | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stopped_by_string: bool = False

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids or self.finish_reason)


class OutputStream:
    """Output of one choice so far. Totals (`text`, `token_ids`, `logprobs`, counts) are valid after every push.

    Runs for every token of every stream, so the common push (one token, no stop strings) makes nothing it does not need.

    keep: special token ids that stay visible for a parser behind this stream (tool-call marks)
    tokens_with_text: deliver tokens together with the text they made; False delivers each token at once
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: list[int],
        *,
        keep: frozenset[int] = frozenset(),
        tokens_with_text: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_ids = prompt_ids
        self._tokens_with_text = tokens_with_text
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, keep)
        self._longest_stop = max(map(len, params.stop), default=0)
        self._held = ""  # text not yet released: the longest end that could still become a stop string
        self._unsent = OutputDelta()
        self._pieces: list[str] = []  # of `text`, joined when somebody asks
        self.token_ids: list[int] = []
        self.logprobs: list[TokenText] | None = [] if params.logprobs is not None else None
        self.prompt_logprobs: list[TokenText | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_prompt_tokens = len(prompt_ids)
        self.num_cached_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    def push(self, output: TokenOutput) -> OutputDelta:
        """Add new tokens. Outputs after the end add nothing. Raises RequestRejected when a token id is out of range:
        the caller aborts that request only."""
        if self.finish_reason is not None:
            return OutputDelta()
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        delta, self._unsent = self._unsent, OutputDelta()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs = [
                None if scored is None else self._scored(scored, piece)
                for scored, piece in zip(output.prompt_logprobs, self.prompt_pieces())
            ]
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            ends = index == last and output.finish_reason == "stop"
            piece = self._detokenizer.push(token_id) if not ends or self._params.include_stop_str_in_output else ""
            stop = self._append(piece, may_stop=not ends)
            self._record(delta, token_id, piece, output.logprobs[index] if output.logprobs else None)
            if stop is not None:
                delta.text += self._held
                self._held = ""
                self._finish(delta, "stop", stop)
                delta.stopped_by_string = output.finish_reason is None
                return self._deliver(delta)
        if output.finish_reason is not None:
            tail = self._detokenizer.finish()
            delta.text += self._held + tail
            self._held = ""
            if tail and delta.logprobs:
                delta.logprobs[-1] = msgspec.structs.replace(delta.logprobs[-1], text=delta.logprobs[-1].text + tail)
                assert self.logprobs is not None
                self.logprobs[-1] = delta.logprobs[-1]
            self._finish(delta, output.finish_reason, output.stop_reason)
        else:
            keep = self._could_be_stop(self._held) if self._longest_stop else 0
            delta.text += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        return self._deliver(delta)

    def _append(self, piece: str, may_stop: bool) -> str | None:
        """Add text; the stop string that it completes, with the held text cut to what remains visible."""
        seen = len(self._held)
        self._held += piece
        if not (may_stop and piece and self._longest_stop) or len(self.token_ids) + 1 < self._params.min_tokens:
            return None
        # The first to be complete wins, the longer one of two that end together: independent of how tokens cut the text.
        ends = [(end, start, stop) for stop in self._params.stop for start, end in _matches(self._held, stop, seen)]
        if not ends:
            return None
        end, start, stop = min(ends)
        self._held = self._held[: end if self._params.include_stop_str_in_output else start]
        return stop

    def _could_be_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for start in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._params.stop):
                return len(text) - start
        return 0

    def _record(self, delta: OutputDelta, token_id: int, piece: str, scored: TokenLogprob | None) -> None:
        self.token_ids.append(token_id)
        delta.token_ids.append(token_id)
        if self.logprobs is not None and scored is not None:
            entry = self._scored(scored, piece)
            self.logprobs.append(entry)
            delta.logprobs = delta.logprobs or []
            delta.logprobs.append(entry)

    def _finish(self, delta: OutputDelta, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = delta.finish_reason = reason
        self.stop_reason = delta.stop_reason = stop_reason

    def _deliver(self, delta: OutputDelta) -> OutputDelta:
        if delta.text:
            self._pieces.append(delta.text)
        elif delta.finish_reason is None and self._tokens_with_text:
            delta, self._unsent = self._unsent, delta
        return delta

    def _scored(self, scored: TokenLogprob, piece: str) -> TokenText:
        tokenizer = self._tokenizer
        return TokenText(
            token_id=scored.token_id,
            text=piece,
            token=tokenizer.token_text(scored.token_id),
            raw=tokenizer.token_bytes(scored.token_id),
            logprob=scored.logprob,
            rank=scored.rank,
            top=[(i, tokenizer.token_text(i), tokenizer.token_bytes(i), value) for i, value in scored.top],
        )

    def prompt_pieces(self) -> list[str]:
        """The text each prompt token adds; joined they are the prompt as echo shows it (special tokens hidden if asked)."""
        detokenizer = IncrementalDetokenizer(self._tokenizer, self._params.skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in self._prompt_ids]
        if pieces:
            pieces[-1] += detokenizer.finish()
        return pieces


def _matches(text: str, stop: str, seen: int) -> list[tuple[int, int]]:
    """(start, end) of the first place where `stop` ends after the first `seen` characters of `text`."""
    start = text.find(stop, max(0, seen - len(stop) + 1))
    return [] if start < 0 else [(start, start + len(stop))]
