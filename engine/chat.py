"""Messages in, prompt out: the model's chat template in a sandbox, with user text kept apart from control tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import msgspec

from engine.errors import ConfigError, RequestRejected
from engine.template_sandbox import TemplateSandbox
from engine.tokenizer import NAMED_TOKENS, Tokenizer, named_tokens, tokenizer_config

ROLES = ("system", "user", "assistant", "tool")
ROLE_ALIASES = {"developer": "system"}
MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
THINKING_SWITCHES = ("thinking", "enable_thinking")  # DeepSeek's and LongCat's names for one thing
THINK_TAGS = ("<think>", "</think>", "<longcat_think>", "</longcat_think>")
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_KWARGS_BYTES = 16384
# Templates read tool-call arguments either as the JSON text or as an object that they print themselves.
_WANTS_OBJECT = re.compile(r"arguments['\"\])\s]*(\|\s*(tojson|items|dictsort)|\.items\()")
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # reserved by Unicode for a program's internal use

Message = dict[str, Any]


class ChatTemplate:
    """A model's chat template (or none: then rendering is refused with the fix). Safe to use from several threads."""

    def __init__(self, sources: dict[str, str], tokens: dict[str, str], origin: str = "chat template") -> None:
        """sources: name -> Jinja source ("default", and "tool_use" where the model has one for tools);
        tokens: spelling of the special tokens that templates refer to. Raises ConfigError on a template that is no Jinja."""
        self._sandbox = TemplateSandbox()
        self._tokens = tokens
        self.source = "\n".join(sources.values())
        try:
            self._templates = {name: self._sandbox.from_string(source) for name, source in sources.items()}
            names = set().union(
                *(jinja2.meta.find_undeclared_variables(self._sandbox.parse(s)) for s in sources.values()), set()
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin}, line {error.lineno}: {error.message}; fix it or give another with --chat-template"
            ) from error
        reserved = {
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            *NAMED_TOKENS,
            *self._sandbox.globals,
        }
        self.parameters = frozenset(names - reserved)

    @classmethod
    def load(cls, folder: Path, override: str | Path | None = None) -> ChatTemplate:
        """Read `override`, else chat_template.jinja, else tokenizer_config.json. Raises ConfigError naming the file."""
        config = tokenizer_config(folder)
        tokens = named_tokens(config)
        file = Path(override) if override else folder / "chat_template.jinja"
        if override or file.is_file():
            try:
                return cls({"default": file.read_text(encoding="utf-8")}, tokens, str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat template {file} cannot be read: {error}") from error
        declared = config.get("chat_template")
        origin = str(folder / "tokenizer_config.json")
        try:
            if isinstance(declared, list):
                declared = {entry["name"]: entry["template"] for entry in declared}
            elif isinstance(declared, str):
                declared = {"default": declared}
            return cls(declared or {}, tokens, origin)
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{origin}: chat_template must be a text or a list of named texts, got {declared!r:.60}; fetch the file again"
            ) from error

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text. `encode` is what generation uses: in text, a user's `<think>` looks like the control token.

        kwargs: the template's own switches; `thinking` and `enable_thinking` are one switch under both names
        Raises RequestRejected naming the field.
        """
        if not self._templates:
            raise RequestRejected(
                "messages: this model has no chat template; start with --chat-template FILE or use plain prompts",
                param="messages",
            )
        if continue_final_message:
            if add_generation_prompt:
                raise RequestRejected(
                    "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
                )
            if not messages or messages[-1].get("role") != "assistant":
                raise RequestRejected(
                    "continue_final_message: the last message must come from the assistant", param="continue_final_message"
                )
        variables = self.switches(kwargs) | self._tokens
        as_object = _WANTS_OBJECT.search(self.source) is not None
        normal = [_normal_message(message, index, as_object) for index, message in enumerate(messages)]
        if not normal:
            raise RequestRejected("messages: must not be empty", param="messages")
        mark = ""
        if continue_final_message:
            mark = _unused_character([normal, tools])
            normal[-1]["content"] = (normal[-1].get("content") or "") + mark
        variables |= {"messages": normal, "tools": tools, "add_generation_prompt": add_generation_prompt}
        template = self._templates.get("tool_use" if tools else "default") or next(iter(self._templates.values()))
        try:
            text = self._sandbox.render(template, variables)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise RequestRejected(f"messages: the chat template cannot render them: {error}", param="messages") from error
        if mark:
            text, found, _ = text.rpartition(mark)
            if not found:
                raise RequestRejected(
                    "continue_final_message: the chat template drops the last message", param="continue_final_message"
                )
        return text

    def encode(self, tokenizer: Tokenizer, messages: list[Message], **options: Any) -> tuple[str, list[int]]:
        """(prompt text, token ids); options as for `render`. Control tokens come from the template alone: text in messages
        and tools that spells one stays text, except think tags in an assistant's earlier answer."""
        tools = options.get("tools")
        guard = _unused_character([messages, tools])
        guarded = [_guarded(message, tokenizer, guard, message.get("role") == "assistant") for message in messages]
        if tools:
            options["tools"] = _guarded(tools, tokenizer, guard, False)
        text = self.render(guarded, **options)
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=True, guard=guard)
        return text.replace(guard, ""), ids

    def switches(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Template variables from user-given switches. Raises RequestRejected for names this template does not read."""
        if len(kwargs) > MAX_TEMPLATE_KWARGS or len(_json(kwargs, "chat_template_kwargs")) > MAX_TEMPLATE_KWARGS_BYTES:
            limit = f"at most {MAX_TEMPLATE_KWARGS} entries and {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON"
            raise RequestRejected(f"chat_template_kwargs: {limit}", param="chat_template_kwargs")
        values: dict[str, Any] = {}
        for name, value in kwargs.items():
            names = (
                [switch for switch in THINKING_SWITCHES if switch in self.parameters] if name in THINKING_SWITCHES else [name]
            )
            if not names or not self.parameters.issuperset(names):
                known = ", ".join(sorted(self.parameters)) or "none"
                raise RequestRejected(
                    f"chat_template_kwargs: this model's template has no switch {name!r}; it has: {known}",
                    param="chat_template_kwargs",
                )
            values |= dict.fromkeys(names, value)
        return values

    def turn_end(self, tokenizer: Tokenizer) -> int | None:
        """The control token the template puts after an assistant's text: where the model's turn ends."""
        if not self._templates:
            return None
        mark = _NONCHARACTERS[0]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        try:
            after = self.render(messages, add_generation_prompt=False).partition(mark)[2].lstrip()
        except RequestRejected:
            return None
        found = [token for token in tokenizer.control_tokens if after.startswith(token) and token not in THINK_TAGS]
        return tokenizer.control_tokens[max(found, key=len)] if found else None


def _normal_message(message: Message, index: int, arguments_as_object: bool) -> Message:
    """A message in the form templates expect: text content, known role, no empty fields."""
    at = f"messages[{index}]"
    given = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if unknown := sorted(given.keys() - MESSAGE_FIELDS):
        raise RequestRejected(f"{at}: field {unknown[0]!r} is not supported", param="messages")
    role = given.get("role")
    role = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise RequestRejected(f"{at}: role must be one of {', '.join((*ROLES, *ROLE_ALIASES))}, got {role!r}", param="messages")
    if "content" not in given and not (role == "assistant" and (given.get("tool_calls") or given.get("reasoning_content"))):
        if role == "assistant":
            raise RequestRejected(f"{at}: an assistant message needs content or tool_calls", param="messages")
        raise RequestRejected(f"{at}: content is missing", param="messages")
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if name in given and not isinstance(given[name], str):
            raise RequestRejected(f"{at}: {name} must be a string", param="messages")
    if not isinstance(given.get("tool_calls", []), list):
        raise RequestRejected(f"{at}: tool_calls must be a list", param="messages")
    normal: Message = {**given, "role": role, "content": _text_content(given.get("content"), at)}
    if reasoning := given.get("reasoning_content", given.get("reasoning")):
        normal |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if "tool_calls" in given:
        normal["tool_calls"] = [_normal_call(call, at, arguments_as_object) for call in given["tool_calls"]]
    return normal


def _text_content(content: Any, at: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RequestRejected(
                    f"{at}: content parts of type {kind!r} are not supported; this model reads text", param="messages"
                )
        return "\n".join(part["text"] for part in content)
    raise RequestRejected(f"{at}: content must be a string or a list of text parts", param="messages")


def _normal_call(call: Any, at: str, arguments_as_object: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRejected(f"{at}: each tool call needs function.name and function.arguments", param="messages")
    arguments = function.get("arguments") or "{}"
    if arguments_as_object and isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError as error:
            raise RequestRejected(
                f"{at}: function.arguments of {function['name']!r} is not JSON: {error}", param="messages"
            ) from error
    elif not arguments_as_object and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _guarded(value: Any, tokenizer: Tokenizer, guard: str, keep_think_tags: bool) -> Any:
    """The same structure with the guard inside every spelled control token."""
    if isinstance(value, str):
        return tokenizer.guarded(value, guard, THINK_TAGS if keep_think_tags else ())
    if isinstance(value, list):
        return [_guarded(item, tokenizer, guard, keep_think_tags) for item in value]
    if isinstance(value, dict):
        return {_guarded(k, tokenizer, guard, False): _guarded(v, tokenizer, guard, keep_think_tags) for k, v in value.items()}
    return value


def _json(value: Any, param: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError
        raise RequestRejected(f"{param}: must hold JSON values and valid Unicode only: {error}", param=param) from error


def _unused_character(value: Any) -> str:
    """A character that occurs nowhere in `value` and that no text needs."""
    text = _json(value, "messages").decode()
    for character in _NONCHARACTERS:
        if character not in text:
            return character
    raise RequestRejected(
        "messages: text holds all of U+FDD0..U+FDEF, which Unicode reserves for internal use", param="messages"
    )
