"""From the fields of a request that ask for structured output, and from a forced tool call, to the one grammar they mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from engine.errors import RequestRejected
from engine.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from engine.openai_types import ChatCompletionRequest, CompletionRequest, GenerateRequest, ResponseFormat


class Asked(NamedTuple):
    """A grammar and the field that asked for it."""

    param: str
    grammar: str


def requested_grammar(
    request: CompletionRequest | ChatCompletionRequest | GenerateRequest, response_format: ResponseFormat | None
) -> Asked | None:
    """The one grammar a request asks for, not yet checked; None without. Raises RequestRejected naming the field."""
    asked: list[tuple[str, str, Any]] = []
    if response_format is not None and response_format.type != "text":
        asked.append(("response_format", "json", _format_schema(response_format)))
    if (structured := request.structured_outputs) is not None:
        fields = (
            ("json", structured.json_schema), ("regex", structured.regex),
            ("choice", structured.choice), ("grammar", structured.grammar),
        )  # fmt: skip
        named: list[tuple[str, str, Any]] = [("structured_outputs", kind, value) for kind, value in fields if value is not None]
        named += [("structured_outputs", "json", None)] if structured.json_object else []
        if not named:
            fix = "give json, json_object, regex, choice or grammar"
            raise RequestRejected(f"structured_outputs: {fix}", param="structured_outputs")
        asked += named
    guided = (
        ("json", request.guided_json), ("regex", request.guided_regex),
        ("choice", request.guided_choice), ("grammar", request.guided_grammar),
    )  # fmt: skip
    asked += [(f"guided_{kind}", kind, value) for kind, value in guided if value is not None]
    if len(asked) > 1:
        raise RequestRejected(f"{asked[1][0]}: only one structured output per request", param=asked[1][0])
    return Asked(asked[0][0], _build(*asked[0])) if asked else None


def forced_call_grammar(tools: list[dict[str, Any]], name: str) -> str:
    """Grammar of the named function's arguments; without a name, of a list of calls to any of the tools."""
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
    if name:
        return json_grammar(parameters[name], "tools")
    definitions: dict[str, Any] = {}  # references in a schema start from its root, so definitions move there
    calls = []
    for tool, schema in parameters.items():
        for key, value in schema.get("$defs", {}).items():
            if definitions.setdefault(key, value) != value:
                raise RequestRejected(f"tools: two tools define $defs.{key} differently; rename one", param="tools")
        arguments = {key: value for key, value in schema.items() if key != "$defs"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool}, "parameters": arguments},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    return json_grammar({"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}, "tools")


def _format_schema(response_format: ResponseFormat) -> Any:
    if response_format.type == "json_object":
        return None
    if response_format.json_schema is None or response_format.json_schema.json_schema is None:
        raise RequestRejected("response_format: json_schema needs json_schema.schema", param="response_format")
    return response_format.json_schema.json_schema


def _build(param: str, kind: str, value: Any) -> str:
    if kind == "json":
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise RequestRejected(f"{param}: is not JSON: {error}", param=param) from error
        return json_grammar(value, param)
    if kind == "choice":
        return choice_grammar(value, param)
    return regex_grammar(value, param) if kind == "regex" else lark_grammar(value, param)
