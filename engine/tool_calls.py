"""Tool calls out of generated text, for the formats of DeepSeek, Kimi and LongCat and for forced JSON calls.

Every parser is a state machine over the text in pieces of any size: joined, its pieces are the same for every cut. Text
that turns out to be no call after all is handed on as content; nothing is dropped but white space around calls.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NamedTuple

import msgspec

from engine.reasoning import MarkScanner, Trimmer


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A piece of call number `index`: id and name come first and once, then more of the arguments (JSON text)."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Pieces(NamedTuple):
    """What one push brought to light."""

    content: str
    calls: list[ToolCallDelta]


class CallMarks(NamedTuple):
    """Marks around calls. `head`: the marks between a call's begin and its arguments; the name stands before the last.

    fenced: arguments end with a code fence before the call's end
    """

    section: str
    section_end: str
    call: str
    head: tuple[str, ...]
    call_end: str
    fenced: bool = False


MARKED_FORMATS = {
    "deepseek_v31": CallMarks(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", ("<｜tool▁sep｜>",), "<｜tool▁call▁end｜>"
    ),
    "deepseek_v3": CallMarks(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        ("<｜tool▁sep｜>", "```json"),
        "<｜tool▁call▁end｜>",
        fenced=True,
    ),
    "kimi_k2": CallMarks(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        ("<|tool_call_argument_begin|>",),
        "<|tool_call_end|>",
    ),
}
LONGCAT_BEGIN, LONGCAT_END = "<longcat_tool_call>", "</longcat_tool_call>"
TOOL_FORMATS = (*MARKED_FORMATS, "longcat")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?):(\d+)", re.DOTALL)
_LONGCAT_PAIR = re.compile(
    r"\s*<longcat_arg_key>(.*?)</longcat_arg_key>\s*<longcat_arg_value>(.*?)</longcat_arg_value>\s*", re.DOTALL
)


def marks_of(format_name: str) -> tuple[str, ...]:
    """Spellings that must stay visible in the text for the parser."""
    if format_name == "longcat":
        names = ("tool_call", "arg_key", "arg_value")
        return tuple(f"<{slash}longcat_{name}>" for name in names for slash in ("", "/"))
    marks = MARKED_FORMATS[format_name]
    return (marks.section, marks.section_end, marks.call, marks.head[0], marks.call_end)


class MarkedCallParser:
    """Calls between marks: DeepSeek-V3, DeepSeek-V3.1, Kimi-K2. Arguments stream as they are generated."""

    def __init__(self, marks: CallMarks) -> None:
        self._marks = marks
        self._scanner = MarkScanner()
        self._state = "text"  # text -> section -> head -> arguments -> section -> text
        self._text = Trimmer(leading=True)  # before the first call white space waits: at the end it goes if a call follows
        self._raw_head = ""
        self._head = ""
        self._heads_seen = 0
        self._arguments = Trimmer()
        self.num_calls = 0

    def push(self, text: str) -> Pieces:
        self._scanner.feed(text)
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._step(content, calls):
            pass
        return Pieces("".join(content), calls)

    def finish(self) -> Pieces:
        """The rest. A call cut off in its arguments stays a call, one cut off in its head becomes content."""
        rest = self._scanner.rest()
        if self._state == "arguments":
            piece = self._arguments.push(rest) + self._arguments.flush()
            return Pieces("", [ToolCallDelta(self.num_calls - 1, arguments=piece)] if piece else [])
        return Pieces(self._text.push(self._raw_head + rest) + self._text.flush(), [])

    def _step(self, content: list[str], calls: list[ToolCallDelta]) -> bool:
        """Advance to the next mark. False when more text is needed."""
        marks = self._marks
        if self._state == "text":
            text, mark = self._scanner.take(marks.section)
            content.append(self._text.push(text))
            if mark is not None:
                self._state = "section"
                self._text = Trimmer()  # white space before and between calls goes
        elif self._state == "section":
            text, mark = self._scanner.take(marks.call, marks.section_end)
            content.append(self._text.push(text))
            if mark == marks.section_end:
                self._state = "text"
            elif mark == marks.call:
                self._state, self._raw_head, self._head, self._heads_seen = "head", mark, "", 0
        elif self._state == "head":
            expected = marks.head[self._heads_seen]
            text, mark = self._scanner.take(expected, marks.call_end)
            self._raw_head += text + (mark or "")
            self._head += text
            if mark == marks.call_end:  # no arguments: not a call
                content.append(self._text.push(self._raw_head))
                self._state, self._raw_head = "section", ""
            elif mark is not None and self._heads_seen + 1 < len(marks.head):
                self._heads_seen, self._head = self._heads_seen + 1, ""
            elif mark is not None:
                calls.append(self._begin_call())
        else:
            text, mark = self._scanner.take(marks.call_end, marks.section_end)
            if piece := self._arguments.push(text):
                calls.append(ToolCallDelta(self.num_calls - 1, arguments=piece))
            if mark is not None:
                self._state = "section" if mark == marks.call_end else "text"
        return mark is not None

    def _begin_call(self) -> ToolCallDelta:
        name = self._head.strip()
        call_id = new_call_id()
        if match := _KIMI_ID.fullmatch(name):
            call_id, name = name, match[1]  # Kimi's own numbering, which its template expects back
        self._state, self._raw_head = "arguments", ""
        self._arguments = Trimmer(hold="`" if self._marks.fenced else "")
        self.num_calls += 1
        return ToolCallDelta(self.num_calls - 1, call_id, name)


class LongcatCallParser:
    """LongCat's calls: a JSON object in tags, or a name and tagged pairs. A call appears when it is complete."""

    def __init__(self, tools: list[dict[str, Any]] | None = None) -> None:
        self._scanner = MarkScanner()
        self._in_call = False
        self._body = ""
        self._text = Trimmer(leading=True)
        self._types = {tool["function"]["name"]: _parameter_types(tool["function"]) for tool in tools or []}
        self.num_calls = 0

    def push(self, text: str) -> Pieces:
        self._scanner.feed(text)
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        mark: str | None = ""
        while mark is not None:
            piece, mark = self._scanner.take(LONGCAT_END if self._in_call else LONGCAT_BEGIN)
            if not self._in_call:
                content.append(self._text.push(piece))
                self._in_call = mark is not None
                continue
            self._body += piece
            if mark is not None:
                self._in_call = False
                self._complete(content, calls)
        return Pieces("".join(content), calls)

    def finish(self) -> Pieces:
        """The rest. An unfinished call becomes content."""
        if not self._in_call:
            return Pieces(self._text.push(self._scanner.rest()) + self._text.flush(), [])
        body = self._body + self._scanner.rest()
        return Pieces(self._text.flush() + LONGCAT_BEGIN + body, [])

    def _complete(self, content: list[str], calls: list[ToolCallDelta]) -> None:
        body, self._body = self._body, ""
        parsed = self._json_call(body) or self._tagged_call(body)
        if parsed is None:
            content.append(self._text.flush() + LONGCAT_BEGIN + body + LONGCAT_END)
            return
        self._text = Trimmer()  # white space around calls goes
        calls.append(ToolCallDelta(self.num_calls, new_call_id(), *parsed))
        self.num_calls += 1

    def _json_call(self, body: str) -> tuple[str, str] | None:
        try:
            value = json.loads(body)
        except ValueError:
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def _tagged_call(self, body: str) -> tuple[str, str] | None:
        head, tag, pairs = body.partition("<longcat_arg_key>")
        name = head.strip()
        arguments: dict[str, Any] = {}
        position, pairs = 0, tag + pairs
        while position < len(pairs):
            match = _LONGCAT_PAIR.match(pairs, position)
            if match is None:
                return None
            arguments[match[1].strip()] = _typed(match[2], self._types.get(name, {}).get(match[1].strip()))
            position = match.end()
        return (name, json.dumps(arguments, ensure_ascii=False)) if name and not re.search(r"[\s<>{]", name) else None


class ForcedCallParser:
    """Calls whose whole text is JSON because a grammar forced it (tool_choice "required" or a named function).

    name: the chosen function, whose arguments the text is; None: the text is a list of {"name", "parameters"}
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._body = ""
        self.num_calls = 0

    def push(self, text: str) -> Pieces:
        if self._name is None:
            self._body += text
            return Pieces("", [])
        if self.num_calls == 0 and text:
            self.num_calls = 1
            return Pieces("", [ToolCallDelta(0, new_call_id(), self._name, text)])
        return Pieces("", [ToolCallDelta(0, arguments=text)] if text else [])

    def finish(self) -> Pieces:
        """The calls of a list; text that was cut off before it was JSON becomes content."""
        if self._name is not None or not self._body:
            return Pieces("", [])
        try:
            found = [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in json.loads(self._body)]
        except (ValueError, TypeError, KeyError):
            return Pieces(self._body, [])
        self.num_calls = len(found)
        return Pieces("", [ToolCallDelta(index, new_call_id(), *call) for index, call in enumerate(found)])


ToolCallParser = MarkedCallParser | LongcatCallParser | ForcedCallParser


def tool_call_parser(format_name: str, tools: list[dict[str, Any]] | None = None) -> ToolCallParser:
    """A fresh parser of one output."""
    return LongcatCallParser(tools) if format_name == "longcat" else MarkedCallParser(MARKED_FORMATS[format_name])


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def _parameter_types(function: dict[str, Any]) -> dict[str, Any]:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {name: schema.get("type") for name, schema in properties.items() if isinstance(schema, dict)}


def _typed(text: str, declared: Any) -> Any:
    """A tagged argument's value: text where the tool declares text, else JSON where it is JSON."""
    if declared == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
