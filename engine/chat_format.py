"""Which reasoning tags and tool-call marks a model uses, and the parser of one answer made of both."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.reasoning import REASONING_FORMATS, ReasoningSplitter
from engine.tokenizer import Tokenizer
from engine.tool_calls import (
    MARKED_FORMATS,
    TOOL_FORMATS,
    ForcedCallParser,
    ToolCallDelta,
    ToolCallParser,
    marks_of,
    tool_call_parser,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatFormat:
    """Names of the model's formats, None where it has none."""

    reasoning: str | None = None
    tools: str | None = None

    @classmethod
    def detect(
        cls, template: str, tokenizer: Tokenizer, model_type: str, reasoning: str = "auto", tools: str = "auto"
    ) -> ChatFormat:
        """Formats from the template's source, then the vocabulary and the model type; a name given by the operator wins
        and is warned about when the model does not know its marks. Raises ConfigError for an unknown name."""
        chosen = cls(
            _choose("reasoning_parser", reasoning, tuple(REASONING_FORMATS), _reasoning_format(template, tokenizer)),
            _choose("tool_call_parser", tools, TOOL_FORMATS, _tool_format(template, tokenizer, model_type)),
        )
        marks = marks_of(chosen.tools)[:1] if chosen.tools else ()
        marks += REASONING_FORMATS[chosen.reasoning][:1] if chosen.reasoning else ()
        for mark in marks:
            if mark not in template and tokenizer.token_id(mark) is None:
                log.warning(
                    "%s: neither the chat template nor the vocabulary has %s; is this the model's format?", chosen, mark
                )
        return chosen

    def visible_ids(self, tokenizer: Tokenizer, with_tools: bool) -> frozenset[int]:
        """Special tokens that must reach the parser though the user does not see special tokens."""
        marks: list[str] = [*REASONING_FORMATS[self.reasoning]] if self.reasoning else []
        marks += marks_of(self.tools) if self.tools and with_tools else ()
        return frozenset(token_id for mark in marks if (token_id := tokenizer.token_id(mark)) is not None)


class ChatPiece(NamedTuple):
    """What more text meant: reasoning, answer and tool-call pieces."""

    reasoning: str
    content: str
    calls: list[ToolCallDelta]

    def __bool__(self) -> bool:  # type: ignore[override]
        return bool(self.reasoning or self.content or self.calls)


class ChatParser:
    """One answer's text, in pieces of any size, into reasoning, content and tool calls.

    prompt: decides whether the text begins inside the reasoning; tools: what the request offers, None to leave calls as text
    forced: a parser for text that a grammar forces to be calls, in place of the model's own format
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        prompt: str,
        tools: list[dict[str, Any]] | None = None,
        forced: ForcedCallParser | None = None,
    ) -> None:
        tags = REASONING_FORMATS[chat_format.reasoning] if chat_format.reasoning else None
        self._reasoning = ReasoningSplitter(tags, prompt)
        self._calls: ToolCallParser | None = forced
        if forced is None and tools and chat_format.tools:
            self._calls = tool_call_parser(chat_format.tools, tools)

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str) -> ChatPiece:
        reasoning, answer = self._reasoning.push(text)
        if self._calls is None or not answer:
            return ChatPiece(reasoning, answer, [])
        return ChatPiece(reasoning, *self._calls.push(answer))

    def finish(self) -> ChatPiece:
        """What was held back, at the end of the text."""
        reasoning, answer = self._reasoning.finish()
        if self._calls is None:
            return ChatPiece(reasoning, answer, [])
        first, last = self._calls.push(answer), self._calls.finish()
        return ChatPiece(reasoning, first.content + last.content, first.calls + last.calls)


def reasoning_is_open(chat_format: ChatFormat, prompt: str) -> str | None:
    """The tag that will close the reasoning a prompt has opened, None if it has opened none."""
    tags = REASONING_FORMATS[chat_format.reasoning] if chat_format.reasoning else None
    return tags.close if tags and prompt.rstrip().endswith(tags.open) else None


def _choose(flag: str, name: str, known: tuple[str, ...], detected: str | None) -> str | None:
    if name in ("auto", ""):
        return detected
    if name == "none":
        return None
    if name not in known:
        raise ConfigError(f"{flag}: {name!r} is not one of auto, none, {', '.join(known)}")
    return name


def _reasoning_format(template: str, tokenizer: Tokenizer) -> str | None:
    names = [
        name for name, tags in REASONING_FORMATS.items() if tags.open in template or tokenizer.token_id(tags.open) is not None
    ]
    return names[-1] if names else None  # a LongCat vocabulary may know both pairs; DeepSeek's never has LongCat's


def _tool_format(template: str, tokenizer: Tokenizer, model_type: str) -> str | None:
    if "<longcat_tool_call>" in template or model_type.startswith("longcat"):
        return "longcat"
    for mark, name in ((MARKED_FORMATS["kimi_k2"].section, "kimi_k2"), (MARKED_FORMATS["deepseek_v3"].section, "deepseek_v3")):
        if mark in template:
            # V3 and V3.1 share marks and model type; only V3 puts its arguments into a fenced block.
            return "deepseek_v31" if name == "deepseek_v3" and "```json" not in template else name
    return None
