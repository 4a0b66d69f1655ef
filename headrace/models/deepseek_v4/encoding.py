"""DeepSeek-V4's chat format, which is published as code instead of a template: renders messages to prompt text.

Three long texts that the model was trained on are not part of this package. They are read from the ``encoding`` folder
beside the model's weights and identified by their SHA-256; requests that need a missing one are refused. Torch-free.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import RequestError, UnsupportedFeature

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT, REMINDER, DSML = "<think>", "</think>", "<｜latest_reminder｜>", "｜DSML｜"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
"""Values of a message's ``task``; rendered as ``<｜action｜>`` and so on."""

TEXT_DIGESTS = {
    "tools": "09b7269daaddbeaf11a3ed55c07b1846c35162b841d8b4301bbe0449879d1fd8",
    "response_format": "012f31fcc1338bdfe25b132eaf56ab020ee75ab8e649f37b30b8e5f544fb17a5",
    "max_effort": "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
}
"""SHA-256 of the published texts in UTF-8."""

MAX_CODE_BYTES = 1 << 20  # larger Python files are skipped, not parsed
CHAT_EFFORT, MAX_EFFORT = "none", "max"
TURNS = ("user", "developer")


def find_texts(folder: Path) -> dict[str, str]:
    """The published texts found among the string constants of the Python files in ``folder``/encoding, by the names in
    `TEXT_DIGESTS`. The files come with a download: they are parsed, never imported or executed."""
    names = {digest: name for name, digest in TEXT_DIGESTS.items()}
    found: dict[str, str] = {}
    for path in sorted((folder / "encoding").glob("*.py")):
        if path.stat().st_size > MAX_CODE_BYTES:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        texts = (
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        digests = ((names.get(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()), text) for text in texts)
        found |= {name: text for name, text in digests if name}
    return found


@dataclass(frozen=True)
class _Mode:
    """Rendering options. ``last_turn``: index of the last user or developer message; with ``drops_reasoning``, the
    reasoning of turns before it is left out. ``is_last_open``: the final assistant message is to be continued, so it
    gets no end token."""

    is_thinking: bool
    drops_reasoning: bool
    last_turn: int
    add_generation_prompt: bool
    is_last_open: bool

    def thinks_at(self, index: int) -> bool:
        """Whether the assistant's turn after message ``index`` begins with reasoning."""
        return self.is_thinking and (not self.drops_reasoning or index >= self.last_turn)


class ChatEncoder:
    """Renders with the interface of a chat template (`headrace.service.tokenization`). ``folder`` is the model's."""

    def __init__(self, folder: Path):
        self._texts = find_texts(folder)

    @property
    def texts(self) -> list[str]:
        """Text in which the tool and reasoning parsers look for their markers, as in a template's text."""
        return [f"{ASSISTANT}{THINK}{THOUGHT}<{DSML}tool_calls>"]

    @property
    def takes_tools(self) -> bool:
        """Whether the published text that introduces tools was found."""
        return "tools" in self._texts

    def render(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None, template: str | None = None, variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. ``variables``: ``thinking`` or ``enable_thinking`` (default true), ``reasoning_effort``
        (``none``: no thinking; ``max``: with the model's text that asks for it), ``drop_thinking`` (default true),
        ``response_format`` (a JSON schema). A message may have ``reasoning_content``, ``task`` and tools of its own.
        Raises `RequestError`."""
        if template is not None:
            raise UnsupportedFeature(
                "this model's chat format is code; it takes no chat_template", param="chat_template"
            )
        if not messages:
            raise RequestError("messages must hold at least one message", param="messages")
        variables = variables or {}
        # either name, as chat templates of other models use both
        effort = variables.get("reasoning_effort")
        is_thinking = bool(variables.get("thinking", variables.get("enable_thinking", True))) and effort != CHAT_EFFORT
        turns = fold_tool_results([_check(message) for message in messages])
        if tools or variables.get("response_format"):
            turns = _with_system_sections(turns, tools, variables.get("response_format"))
        drops = (
            is_thinking and bool(variables.get("drop_thinking", True)) and not any(turn.get("tools") for turn in turns)
        )
        last_turn = max((i for i, turn in enumerate(turns) if turn["role"] in TURNS), default=-1)
        if drops:
            # developer messages before the last turn go too, which moves the index
            turns = [turn for i, turn in enumerate(turns) if turn["role"] != "developer" or i >= last_turn]
            last_turn = max((i for i, turn in enumerate(turns) if turn["role"] in TURNS), default=-1)
        mode = _Mode(is_thinking, drops, last_turn, add_generation_prompt, continue_final_message)
        prefix = self._text("max_effort", "reasoning_effort") if is_thinking and effort == MAX_EFFORT else ""
        return BEGIN + prefix + "".join(self._render_turn(turns, i, mode) for i in range(len(turns)))

    def _render_turn(self, turns: list[dict[str, Any]], index: int, mode: _Mode) -> str:
        turn, is_last = turns[index], index == len(turns) - 1
        if turn["role"] == "assistant":
            thinks = mode.is_thinking and (not mode.drops_reasoning or index > mode.last_turn)
            reasoning = (turn.get("reasoning_content") or "") + THOUGHT if thinks else ""
            end = "" if is_last and mode.is_last_open else END
            return reasoning + turn["content"] + write_calls(turn.get("tool_calls") or ()) + end
        if turn["role"] == "latest_reminder":
            return REMINDER + turn["content"]
        if turn["role"] == "system":
            return turn["content"] + self._sections(turn)
        # user and developer turns: the assistant's opening is written here, after the turn that it answers
        following = None if is_last else turns[index + 1]["role"]
        text = USER + turn["content"] + self._sections(turn)
        opening = ASSISTANT + (THINK if mode.thinks_at(index) else THOUGHT)
        if turn.get("task") in TASKS:
            return text + (opening if turn["task"] == "action" else "") + f"<｜{turn['task']}｜>"
        opens = mode.add_generation_prompt if is_last else following in ("assistant", "latest_reminder")
        return text + opening if opens else text

    def _sections(self, turn: dict[str, Any]) -> str:
        """Text after a turn's content: the tools it declares and the response format it asks for."""
        text = ""
        if turn.get("tools"):
            schemas = "\n".join(_to_json(tool.get("function", tool)) for tool in turn["tools"])
            text += "\n\n" + self._text("tools", "tools").format(
                tool_schemas=schemas, dsml_token=DSML, thinking_start_token=THINK, thinking_end_token=THOUGHT,
            )
        if turn.get("response_format"):
            text += (
                "\n\n"
                + self._text("response_format", "response_format").format(schema=_to_json(turn["response_format"]))
            )
        return text

    def _text(self, name: str, param: str) -> str:
        if name not in self._texts:
            raise UnsupportedFeature(
                f"{param} needs a text of the model's makers; put the encoding folder of the published model beside "
                "its weights",
                param=param,
            )
        return self._texts[name]


def fold_tool_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn tool results into user turns, as the format has no tool role. Results of one assistant turn are ordered as
    its calls; a user message right after them is appended to the same turn."""
    turns: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []
    for message in [*messages, None]:  # None flushes results at the end
        if message is not None and message["role"] == "tool":
            pending.append(message)
            continue
        if pending:
            blocks = [f"<tool_result>{result['content']}</tool_result>" for result in _in_call_order(pending, turns)]
            pending = []
            if message is not None and message["role"] == "user":
                message = {**message, "content": "\n\n".join([*blocks, message["content"]])}
            else:
                turns.append({"role": "user", "content": "\n\n".join(blocks)})
        if message is not None:
            turns.append(message)
    return turns


def _in_call_order(results: list[dict[str, Any]], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results sorted by the position of their call in the last turn; unknown call ids last, in the order given."""
    calls = (turns[-1].get("tool_calls") or ()) if turns else ()
    order = {call.get("id"): at for at, call in enumerate(calls)}
    return sorted(results, key=lambda result: order.get(result.get("tool_call_id"), len(order)))


def write_calls(calls: Sequence[dict[str, Any]]) -> str:
    """The block of tool calls at the end of an assistant's turn; empty without calls."""
    if not calls:
        return ""
    invokes = "\n".join(_write_call(call.get("function", call)) for call in calls)
    return f"\n\n<{DSML}tool_calls>\n{invokes}\n</{DSML}tool_calls>"


def _write_call(function: dict[str, Any]) -> str:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(
                f"the arguments of a call to {function.get('name')} are no JSON: {error}", param="messages"
            ) from error
    if not isinstance(arguments, dict):
        raise RequestError(f"the arguments of a call to {function.get('name')} must be a JSON object", param="messages")
    # strings are written as they are, other values as JSON; the attribute tells the parser which
    parameters = "\n".join(
        f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _to_json(value)}</{DSML}parameter>"
        for name, value in arguments.items()
    )
    return f'<{DSML}invoke name="{function.get("name")}">\n{parameters}\n</{DSML}invoke>'


def _with_system_sections(turns: list[dict[str, Any]], tools: Any, response_format: Any) -> list[dict[str, Any]]:
    """The turns with tools and response format attached to the first system turn, which is inserted if missing."""
    if turns[0]["role"] != "system":
        turns = [{"role": "system", "content": ""}, *turns]
    first = {
        **turns[0], **({"tools": tools} if tools else {}),
        **({"response_format": response_format} if response_format else {})
    }
    return [first, *turns[1:]]


def _check(message: Any) -> dict[str, Any]:
    """The message with its content as one string; raises `RequestError` for what the format cannot express."""
    roles = ("system", "user", "assistant", "tool", "developer", "latest_reminder")
    if not isinstance(message, dict) or message.get("role") not in roles:
        raise RequestError(f"each message must be an object with a role out of {', '.join(roles)}", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise UnsupportedFeature("content parts must be text", param="messages")
        content = "\n".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError("a message's content must be a string or a list of parts", param="messages")
    return {
        **message, "content": content or "",
        "reasoning_content": message.get("reasoning_content") or message.get("reasoning") or ""
    }


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
