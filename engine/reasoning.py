"""Splitting a model's reasoning from its answer while the text arrives, in pieces of any size.

The same state machine serves whole texts and streams, so the result does not depend on how the text is cut.
"""

from __future__ import annotations

from typing import NamedTuple


class ReasoningTags(NamedTuple):
    """What opens and closes a model's reasoning."""

    open: str
    close: str


REASONING_FORMATS = {
    "deepseek": ReasoningTags("<think>", "</think>"),
    "longcat": ReasoningTags("<longcat_think>", "</longcat_think>"),
}


class MarkScanner:
    """Text up to the next mark, with the end that may be the beginning of a mark held back."""

    def __init__(self) -> None:
        self._buffer = ""

    def feed(self, text: str) -> None:
        self._buffer += text

    def take(self, *marks: str) -> tuple[str, str | None]:
        """(text that is certain, the mark that follows it). Without a mark yet: what cannot belong to one, and None."""
        found = [(position, -len(mark), mark) for mark in marks if (position := self._buffer.find(mark)) >= 0]
        if found:
            position, _, mark = min(found)
            text, self._buffer = self._buffer[:position], self._buffer[position + len(mark) :]
            return text, mark
        cut = len(self._buffer) - partial_mark(self._buffer, marks)
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return text, None

    def rest(self) -> str:
        """Everything held; for the end of the text."""
        text, self._buffer = self._buffer, ""
        return text


def partial_mark(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins one of the marks."""
    for start in range(max(0, len(text) - max(map(len, marks), default=1) + 1), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return len(text) - start
    return 0


class Trimmer:
    """Drops white space at the end, and unless `leading` at the beginning, of a text that arrives in pieces.

    hold: more characters that go when they stand at the end
    """

    def __init__(self, hold: str = "", leading: bool = False) -> None:
        self._hold = hold
        self._started = leading
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        end = len(text)
        while end and (text[end - 1].isspace() or text[end - 1] in self._hold):
            end -= 1
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """What was held, where the text goes on after all or was cut off."""
        text, self._held = self._held, ""
        return text


class ReasoningSplitter:
    """Divides text into (reasoning, answer). White space around the reasoning is dropped.

    Where the prompt itself opens the tag (templates of thinking models do) the text begins inside the reasoning; otherwise
    it is reasoning only if it begins with the tag.
    """

    def __init__(self, tags: ReasoningTags | None, prompt: str = "") -> None:
        self._tags = tags or ReasoningTags("", "")
        self._scanner = MarkScanner()
        self._reasoning = Trimmer()
        self._answer: Trimmer | None = None  # set after reasoning, whose following white space is dropped
        end = prompt.rstrip()
        if tags is None or end.endswith(tags.close):
            self._state = "answer"
        else:
            self._state = "reasoning" if end.endswith(tags.open) else "start"

    def push(self, text: str) -> tuple[str, str]:
        """(more reasoning, more answer)."""
        self._scanner.feed(text)
        if self._state == "start" and not self._begin():
            return "", ""
        reasoning = ""
        if self._state == "reasoning":
            piece, mark = self._scanner.take(self._tags.close)
            reasoning = self._reasoning.push(piece)
            if mark is None:
                return reasoning, ""
            self._state = "answer"
            self._answer = Trimmer()
        return reasoning, self._answer_text(self._scanner.rest())

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        if self._state == "reasoning":
            return self._reasoning.push(self._scanner.rest()) + self._reasoning.flush(), ""
        return "", self._scanner.rest()

    def _begin(self) -> bool:
        """Decide whether the text opens with reasoning; False while that is open."""
        text = self._scanner.rest()
        seen = text.lstrip()
        if seen.startswith(self._tags.open):
            self._state = "reasoning"
            self._scanner.feed(seen[len(self._tags.open) :])
            return True
        self._scanner.feed(text)
        if self._tags.open.startswith(seen):
            return False
        self._state = "answer"
        return True

    def _answer_text(self, text: str) -> str:
        if self._answer is None:
            return text
        visible = self._answer.push(text)
        if visible:  # only the beginning is trimmed
            visible += self._answer.flush()
            self._answer = None
        return visible
