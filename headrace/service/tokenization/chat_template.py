"""Chat templates: Jinja in a sandbox, with the filters and globals that Hugging Face's renderer has
(``transformers.utils.chat_template_utils``), and with bounds on time and output.

Refuses: choosing parsers and reading tool calls; the content of media, for which templates write placeholders.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.media_config import KINDS as MEDIA_KINDS


class CallArguments(dict[str, Any]):
    """Arguments of a tool call, for both kinds of templates: those that iterate or ``tojson`` them see a dict; those
    that print or concatenate them get the JSON text as it was given."""

    def __init__(self, values: dict[str, Any], text: str | None = None):
        super().__init__(values)
        self._text = json.dumps(values, ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def read_arguments(arguments: Any, where: str) -> CallArguments:
    """Arguments given as JSON text or as an object; raises `RequestError` naming the field."""
    if isinstance(arguments, CallArguments):
        return arguments
    if isinstance(arguments, dict):
        return CallArguments(arguments)
    try:
        values = json.loads(arguments or "{}") if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RequestError(
            f"{where} must be a JSON object (the model's call may have been cut short: leave it out)", param=where
        )
    return CallArguments(values, arguments or "{}")


def shape_calls(calls: Any) -> list[dict[str, Any]]:
    """The ``tool_calls`` of an assistant message, checked, with their arguments as `CallArguments`."""
    if not isinstance(calls, list):
        raise RequestError("tool_calls must be a list", param="messages")
    shaped = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tool_calls[{index}] must have a function with a name", param="messages")
        arguments = read_arguments(function.get("arguments"), f"tool_calls[{index}].function.arguments")
        shaped.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return shaped


MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 32 << 20
MAX_RENDER_SECONDS = 10.0
MAX_REPEATED_CHARS = 1 << 20
MAX_CACHED_TEMPLATES = 16

# Private-use characters: no message contains them by accident.
_END_MARK = "\ue0c7end-of-last-message\ue0c7"
_PROBE = "probe-of-content"
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {"name": "probe", "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
    }
]
_DEADLINE = "headrace_deadline"
_TEMPLATE_FAILURES = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training masks; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds: each loop iteration and macro call checks the deadline, and repetition and powers are
    limited. They guard against mistakes; a template from an untrusted client can still take much memory."""

    intercepted_binops = frozenset(["*", "**"])

    def check_clock(self, context: Any) -> None:
        """Called in each loop iteration and macro; ``context.parent`` holds what the caller passed, which a template's
        ``set`` cannot change."""
        if time.monotonic() > context.parent[_DEADLINE]:
            raise jinja2.TemplateRuntimeError(f"it ran for more than {MAX_RENDER_SECONDS:g} seconds")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        # Rewrites the syntax tree: Jinja has no hook within loops. Macros are included because they may recurse.
        tree = super()._parse(source, name, filename)
        loops: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for loop in loops:
            call = nodes.Call(nodes.EnvironmentAttribute("check_clock"), [nodes.ContextReference()], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and any(_is_long(value, count) for value, count in ((left, right), (right, left))):
            raise jinja2.TemplateRuntimeError("a repetition is too long")
        if operator == "**" and (abs(right) > 64 or abs(left) > 1 << 32):
            raise jinja2.TemplateRuntimeError("a power is too large")
        return super().call_binop(context, operator, left, right)


def _is_long(value: Any, count: Any) -> bool:
    return isinstance(value, str | list | tuple) and isinstance(count, int) and len(value) * count > MAX_REPEATED_CHARS


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# Jinja's own filter escapes characters of HTML; templates expect plain JSON.
def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _new_environment() -> _Environment:
    # The settings of Hugging Face's renderer: the white space of the prompt depends on them.
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@dataclass(frozen=True)
class _Compiled:
    """A compiled template with what probing it showed: whether it renders content given as a string, as a list of
    parts, and whether it shows tools."""

    template: jinja2.Template
    takes_strings: bool
    takes_parts: bool
    takes_tools: bool


class ChatTemplates:
    """The templates of one model by name (``default``, ``tool_use`` …) and the texts of its special tokens."""

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]):
        self._templates = templates
        self._special_tokens = special_tokens
        self._environment: _Environment | None = None
        self._compiled: dict[str, _Compiled] = {}

    def render(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None, template: str | None = None, variables: dict[str, Any] | None = None,
    ) -> str:
        """See `Tokenizer.render_chat`."""
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false: a message cannot be both continued and "
                "begun",
                param="continue_final_message"
            )
        compiled = self._compile(self._choose(template, bool(tools)))
        shaped = [_shape(m, compiled) for m in messages]
        if continue_final_message:
            return self._render_open(compiled, shaped, tools, variables or {})
        return self._run(compiled.template, shaped, add_generation_prompt, tools, variables or {})

    @property
    def texts(self) -> list[str]:
        """The templates themselves."""
        return list(self._templates.values())

    @property
    def takes_tools(self) -> bool:
        """Whether the template used for requests with tools shows them to the model."""
        return bool(self._templates) and self._compile(self._choose(None, True)).takes_tools

    def _choose(self, template: str | None, has_tools: bool) -> str:
        """The template's text: a named one, one given in full, or the model's own."""
        if template is not None:
            text = self._templates.get(template, template)
            if text is template and "{" not in template:  # no template contains no brace: a name that is not known
                raise RequestError(
                    f"chat_template {template!r} is neither a template nor one of the model's: "
                    f"{', '.join(self._templates) or 'none'}",
                    param="chat_template"
                )
            return text
        if not self._templates:
            raise RequestError(
                "the model has no chat template; use completions with a plain prompt, or start the server with "
                "--chat-template FILE",
                param="messages"
            )
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _compile(self, text: str) -> _Compiled:
        found = self._compiled.get(text)
        if found is not None:
            return found
        if len(text) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters", param="chat_template"
            )
        self._environment = self._environment or _new_environment()
        try:
            template = self._environment.from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise RequestError(
                f"the chat template is not valid Jinja: {_describe(error)}", param="chat_template"
            ) from error
        compiled = _Compiled(
            template, takes_strings=self._understands(template, _PROBE),
            takes_parts=self._understands(template, [{"type": "text", "text": _PROBE}]),
            takes_tools=self._shows_tools(template),
        )
        if len(self._compiled) >= MAX_CACHED_TEMPLATES:  # requests may bring templates: drop the oldest
            self._compiled.pop(next(iter(self._compiled)))
        self._compiled[text] = compiled
        return compiled

    def _understands(self, template: jinja2.Template, content: Any) -> bool:
        """Whether a user message with such content is rendered as its text. A template made for the other form often
        does not fail but prints the Python or JSON form of the value: then quotes or keys stand around the text."""
        try:
            rendered = self._run(template, [{"role": "user", "content": content}], False, None, {})
        except RequestError:
            return False
        return (
            _PROBE in rendered
            and not any(repr_mark in rendered for repr_mark in (f"'{_PROBE}'", f'"{_PROBE}"', "'text'"))
        )

    def _shows_tools(self, template: jinja2.Template) -> bool:
        # In both forms of content: a template may raise for the one it does not understand.
        for content in ("a", [{"type": "text", "text": "a"}]):
            with contextlib.suppress(RequestError):
                if _PROBE in self._run(template, [{"role": "user", "content": content}], True, _PROBE_TOOLS, {}):
                    return True
        return False

    def _run(
        self, template: jinja2.Template, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: Any,
        variables: dict[str, Any]
    ) -> str:
        # A caller's variables may replace special tokens, but not what is set after them.
        values = {**self._special_tokens, "documents": None, **variables}
        values.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        values[_DEADLINE] = time.monotonic() + MAX_RENDER_SECONDS
        parts, length = [], 0
        try:
            for part in template.generate(values):
                parts.append(part)
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateRuntimeError(f"its output is longer than {MAX_RENDERED_CHARS} characters")
        except _TEMPLATE_FAILURES as error:
            raise RequestError(
                f"the chat template cannot render these messages: {_describe(error)}", param="messages"
            ) from error
        return "".join(parts)

    def _render_open(
        self, compiled: _Compiled, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]
    ) -> str:
        """Render with a mark behind the last message's text and cut there, so that the message stays open. The space
        behind the mark shows whether the template strips content: if it is gone, so must be the text's own trailing
        white space, which the mark has protected."""
        last = dict(messages[-1])
        if isinstance(last["content"], list):
            *others, part = last["content"]
            content, last["content"] = part["text"], [*others, {**part, "text": part["text"] + _END_MARK + " "}]
        else:
            content, last["content"] = last["content"], last["content"] + _END_MARK + " "
        rendered = self._run(compiled.template, [*messages[:-1], last], False, tools, variables)
        at = rendered.rfind(_END_MARK)
        if at < 0:
            raise RequestError(
                "continue_final_message: the chat template does not show the last message's text",
                param="continue_final_message"
            )
        is_trimmed = not rendered.startswith(" ", at + len(_END_MARK))
        return rendered[:at].removesuffix(content[len(content.rstrip()):]) if is_trimmed else rendered[:at]


def _shape(message: dict[str, Any], compiled: _Compiled) -> dict[str, Any]:
    """The message with its content in a form that the template understands."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("each message must be an object with a role", param="messages")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": shape_calls(message["tool_calls"])}
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return (
            message if compiled.takes_strings or not compiled.takes_parts
            else {**message, "content": [{"type": "text", "text": content}]}
        )
    if not isinstance(content, list):
        raise RequestError("a message's content must be a string or a list of parts", param="messages")
    parts = [_shape_part(part) for part in content]
    if compiled.takes_parts and parts:
        return {**message, "content": parts}
    wrong = next((part["type"] for part in parts if part["type"] != "text"), None)
    if wrong is not None:
        raise UnsupportedFeature(
            f"the model's chat template has no place for parts of type {wrong!r}", param="messages"
        )
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _shape_part(part: Any) -> dict[str, str]:
    """A part as templates know it: a text, or the bare kind of a medium, for which the template writes a placeholder.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_KINDS:
        return {"type": kind}
    if kind != "text":
        raise UnsupportedFeature(
            f"content parts of type {kind!r} are not supported; text and {', '.join(MEDIA_KINDS)} are", param="messages"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError("a text part must have a string in its field text", param="messages")
    return {"type": "text", "text": text}


def _describe(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line else ""
    return f"{error}{where}" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}{where}"
