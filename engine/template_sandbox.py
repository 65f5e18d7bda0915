"""A Jinja environment for chat templates out of model files: nothing to reach, nothing to change, bounded time and size.

Templates come with the weights, from anywhere. On top of Jinja's immutable sandbox each loop turn and call checks a
deadline, and every way to grow a value (repetition, concatenation, padding) is limited.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from typing import Any

import jinja2
import jinja2.filters
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

RENDER_SECONDS = 5.0
MAX_RENDERED_CHARS = 1 << 25
MAX_REPEAT = 1 << 20  # largest count, width or repetition a template may name
FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "indent",
    "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
    "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
)  # fmt: skip


class _Bounded(NodeTransformer):
    """Put a deadline check into each loop turn, and string concatenation behind a size check."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node.lineno)


def _call(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=line), args, [], None, None, lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Renders templates of untrusted origin. `render` may be called from several threads."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], undefined=jinja2.Undefined)
        self._limits = threading.local()
        self.filters = {name: self.filters[name] for name in FILTERS} | {
            "tojson": _tojson, "indent": _indent, "replace": _replace, "join": _join,
        }  # fmt: skip
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Raises SecurityError past the time or size bound, and whatever the template raises."""
        self._limits.deadline = time.monotonic() + RENDER_SECONDS
        parts: list[str] = []
        size = 0
        for part in template.generate(variables):
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise SecurityError(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
            self.tick()
            parts.append(part)
        return "".join(parts)

    def tick(self) -> str:
        """Raise when the deadline of this thread's render has passed."""
        if time.monotonic() > getattr(self._limits, "deadline", float("inf")):
            raise SecurityError(f"the chat template ran for more than {RENDER_SECONDS:g} s")
        return ""

    def concatenate(self, *values: Any) -> str:
        """The `~` operator."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_REPEAT:
                raise SecurityError(f"the chat template names the number {value}, more than {MAX_REPEAT}")
        if isinstance(owner := getattr(obj, "__self__", None), str):
            if obj.__name__ == "replace":
                _check_replaced(owner, *args[:2])
            elif obj.__name__ == "join":
                _check_joined(args[0] if args else (), owner)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Jinja's own wrapper of str.format, after a look at the widths the string asks for."""
        if isinstance(owner := getattr(value, "__self__", None), str) and value.__name__ in ("format", "format_map"):
            _check_format(owner)
        return super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        elif operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        elif operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= 64 and _is_small(left)):
            raise SecurityError("the chat template computes too large a power")
        return super().call_binop(context, operator, left, right)


def _is_small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MAX_REPEAT


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise SecurityError(f"the chat template builds a text of more than {MAX_RENDERED_CHARS} characters")


def _check_replaced(text: Any, old: Any = "", new: Any = "") -> None:
    _check_size(len(str(text)) + str(text).count(str(old)) * len(str(new)))


def _check_joined(values: Any = (), separator: Any = "") -> None:
    if isinstance(values, (list, tuple)):
        _check_size(sum(len(value) if isinstance(value, str) else 1 for value in values) + len(values) * len(str(separator)))


def _check_repeat(value: Any, times: Any) -> None:
    if isinstance(times, int):
        if hasattr(value, "__len__"):
            _check_size(len(value) * max(times, 0))
        elif times.bit_length() > 1024:
            raise SecurityError("the chat template computes too large a number")


def _check_format(text: str) -> None:
    """Widths in format strings are the remaining way to make a huge text of a short one."""
    if re.search(r"\d{5,}|\*|\{[^}]*\{", text):
        raise SecurityError("the chat template uses a format string with a width that is too large or not fixed")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as published templates expect it: not escaped for HTML, keys in their order."""
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise SecurityError("the chat template asks tojson for an indent outside 0..16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= 64:
        raise SecurityError("the chat template indents by more than 64")
    return jinja2.filters.do_indent(text, width, first, blank)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
    _check_replaced(text, old, new)
    return jinja2.filters.do_replace(context, text, old, new, count)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, values: Any, d: str = "", attribute: str | int | None = None) -> Any:
    values = list(values)
    _check_joined(values, d)
    return jinja2.filters.do_join(context, values, d, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
