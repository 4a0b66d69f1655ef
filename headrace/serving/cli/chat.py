"""``headrace chat``: a conversation in the terminal, with a model loaded for it or with that of a running server.
Output streams; Ctrl-C stops it, a second one exits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from headrace.base.errors import ConfigError, HeadraceError
from headrace.serving.cli.answers import ChatModel, LocalModel, ServerModel
from headrace.serving.cli.commands import ENGINE
from headrace.serving.cli.flags import Invocation
from headrace.serving.cli.options import SamplingOptions

HELP = """/reset          clear the conversation
/system TEXT    set the system message and start over
/help           show this
/exit           exit (or Ctrl-D)
Ctrl-C          stop the output; at the prompt: exit"""


@dataclass
class Conversation:
    """The messages so far, in OpenAI's form."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})


class Terminal:
    """Reads lines, runs commands, streams output. ``read_line`` raises `EOFError` at the end."""

    def __init__(
        self, model: ChatModel, sampling: SamplingOptions, conversation: Conversation, console: Console,
        read_line: Callable[[], str]
    ):
        self._model = model
        self._sampling = sampling
        self._conversation = conversation
        self._console = console
        self._read_line = read_line

    def run(self, runner: asyncio.Runner) -> None:
        """Loop until the user exits. The event loop runs during each answer; the prompt blocks outside it."""
        while True:
            try:
                line = self._read_line().strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._run_command(line)
            elif line:
                self._conversation.add("user", line)
                try:
                    runner.run(self._answer())
                except HeadraceError as error:
                    # the question: without an answer the roles would no longer alternate
                    self._conversation.turns.pop()
                    self._console.print(f"error: {error}", style="red", markup=False)

    def _run_command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._conversation.turns.clear()
            self._console.print("The conversation is cleared.", style="dim")
        elif word == "/system":
            self._conversation.system = rest.strip() or None
            self._conversation.turns.clear()
            self._console.print("System message set." if rest.strip() else "System message removed.", style="dim")
        else:
            told = HELP if word == "/help" else f"{word} is no command. There are:\n{HELP}"
            self._console.print(told, style="dim", markup=False, highlight=False)

    async def _answer(self) -> None:
        """Stream one answer. Output before Ctrl-C is kept."""
        text, num_tokens, num_accepted, note, is_reasoning = "", 0, 0, "", False
        began = time.perf_counter()
        try:
            async for piece in self._model.answer(self._conversation.messages(), self._sampling):
                if piece.reasoning:
                    self._show(piece.reasoning, "dim")
                    is_reasoning = True
                if piece.text:
                    self._show("\n\n" + piece.text if is_reasoning else piece.text)
                    is_reasoning = False
                text, num_tokens = text + piece.text, piece.num_tokens or num_tokens
                num_accepted = piece.num_accepted or num_accepted
                note = ", cut at --max-tokens" if piece.finish_reason == "length" else note
        # `asyncio.Runner` turns the first Ctrl-C into a cancellation of this task; the second raises KeyboardInterrupt.
        except asyncio.CancelledError:
            note = ", stopped"
        seconds = time.perf_counter() - began
        speed = f"{num_tokens} tokens, {num_tokens / seconds:.1f} per second" if num_tokens else f"{seconds:.1f} s"
        if num_accepted and num_accepted < num_tokens:  # drafts were used, and the answer has its number of tokens
            speed += f", {num_tokens / (num_tokens - num_accepted):.1f} a step"
        self._console.print(f"\n{speed}{note}", style="dim", highlight=False)
        self._conversation.add("assistant", text)

    def _show(self, text: str, style: str | None = None) -> None:
        self._console.print(text, end="", style=style, markup=False, highlight=False, soft_wrap=True)


def run(invocation: Invocation) -> int:
    """Start the engine or join the server, chat, stop what was started."""
    console = Console()
    options = invocation.section("chat")
    with asyncio.Runner() as runner:
        opening: Coroutine[Any, Any, ChatModel] = (
            _join(invocation) if options.url is not None else _start(invocation, console)
        )
        model = runner.run(opening)
        try:
            console.print(
                f"Talking to {model.title}. /help lists commands, Ctrl-D exits.", style="dim", highlight=False,
                markup=False
            )
            Terminal(
                model, invocation.section("sampling"), Conversation(options.system), console,
                lambda: console.input("[bold cyan]> [/]")
            ).run(runner)
        finally:
            runner.run(model.close())
    return 0


async def _join(invocation: Invocation) -> ServerModel:
    options = invocation.section("chat")
    given = invocation.given_in(ENGINE)
    for name in given:
        if name != "model" and invocation.sources[name] == "flag":
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of an engine, and --url takes that of a running server; "
                "leave one of them out", param=name
            )
    model = ServerModel(options.url, api_key=options.api_key, model=given.get("model"))
    await model.join()
    return model


async def _start(invocation: Invocation, console: Console) -> LocalModel:
    from headrace.serving.offline.async_llm import AsyncLLM  # half a second, which joining a server need not cost

    engine = invocation.given_in(ENGINE)
    name = engine.pop("model", None) or invocation.section("model").model
    llm = AsyncLLM(name, **engine)
    with console.status(f"loading {name} ..."):
        try:
            await llm.start()
        except asyncio.CancelledError:
            await llm.close()
            raise
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        await llm.close()
        raise ConfigError(f"{name} has no chat template; use headrace generate for plain prompts")
    return LocalModel(llm, name)
