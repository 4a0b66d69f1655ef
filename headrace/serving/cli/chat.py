"""``headrace chat``: a conversation in the terminal. Output streams; Ctrl-C stops it, a second one exits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from headrace.base.errors import ConfigError, HeadraceError
from headrace.serving.cli.commands import ENGINE
from headrace.serving.cli.flags import Invocation
from headrace.serving.cli.options import SamplingOptions
from headrace.serving.offline import AsyncLLM

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
        self, llm: AsyncLLM, sampling: SamplingOptions, conversation: Conversation, console: Console,
        read_line: Callable[[], str]
    ):
        self._llm = llm
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
            self._console.print(HELP, style="dim", markup=False, highlight=False)

    async def _answer(self) -> None:
        """Stream one answer. Output before Ctrl-C is kept."""
        llm = self._llm
        assert llm.tokenizer is not None and llm.facts is not None
        prompt = llm.tokenizer.encode(
            llm.tokenizer.render_chat(self._conversation.messages()), add_special_tokens=False
        )
        room = llm.facts.max_model_len - len(prompt)
        params = self._sampling.to_params(
            llm.facts.default_sampling, max_tokens=max(1, min(self._sampling.max_tokens, room))
        )
        text, num_tokens, began, note = "", 0, time.perf_counter(), ""
        try:
            async for output in llm.generate(prompt, params):
                choice = output.outputs[0]
                self._console.print(choice.text[len(text):], end="", markup=False, highlight=False, soft_wrap=True)
                text, num_tokens = choice.text, len(choice.token_ids)
                note = ", cut at --max-tokens" if choice.finish_reason == "length" else ""
        # `asyncio.Runner` turns the first Ctrl-C into a cancellation of this task; the second raises KeyboardInterrupt.
        except asyncio.CancelledError:
            note = ", stopped"
        seconds = time.perf_counter() - began
        self._console.print(
            f"\n{num_tokens} tokens, {num_tokens / seconds:.1f} per second{note}", style="dim", highlight=False
        )
        self._conversation.add("assistant", text)


def run(invocation: Invocation) -> int:
    """Start the engine, chat, stop the engine."""
    console = Console()
    engine = invocation.given_in(ENGINE)
    model = engine.pop("model", None) or invocation.section("model").model
    conversation = Conversation(invocation.section("chat").system)
    with asyncio.Runner() as runner:
        llm = runner.run(_start(model, engine, console))
        try:
            console.print(f"Talking to {model}. /help lists commands, Ctrl-D exits.", style="dim", highlight=False)
            Terminal(
                llm, invocation.section("sampling"), conversation, console, lambda: console.input("[bold cyan]> [/]")
            ).run(runner)
        finally:
            runner.run(llm.close())
    return 0


async def _start(model: str, engine: dict[str, object], console: Console) -> AsyncLLM:
    llm = AsyncLLM(model, **engine)
    with console.status(f"loading {model} ..."):
        try:
            await llm.start()
        except asyncio.CancelledError:
            await llm.close()
            raise
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        await llm.close()
        raise ConfigError(f"{model} has no chat template; use headrace generate for plain prompts")
    return llm
