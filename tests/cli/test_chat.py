"""A conversation over a model that repeats the last message, with commands, errors and Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from test_generate import EchoLLM, new_tokenizer

from headrace.base.errors import ContextLengthExceeded
from headrace.service.client.outputs import CompletionOutput, GenerationOutput
from headrace.serving.cli.answers import LocalModel
from headrace.serving.cli.chat import Conversation, Terminal
from headrace.serving.cli.options import SamplingOptions


class StreamingLLM:
    """Repeats the prompt a character at a time; ``interrupt`` in it sends Ctrl-C midway, ``fail`` fails."""

    def __init__(self):
        self.tokenizer = new_tokenizer()
        self.facts = EchoLLM("m").facts
        self.prompts: list[str] = []
        self.params: list = []

    async def generate(self, prompt: list[int], params):
        text = self.tokenizer.decode(prompt)
        self.prompts.append(text)
        self.params.append(params)
        if text.endswith("fail"):
            raise ContextLengthExceeded("too long")
        answer = text.rpartition(">")[2]
        for end in range(1, len(answer) + 1):
            yield GenerationOutput(
                "r", None, prompt,
                [
                    CompletionOutput(
                        0, answer[:end], prompt[:end], "stop" if end == len(answer) else None,
                        num_accepted_tokens=end // 2 if answer == "drafted!" else 0
                    )
                ]
            )
            if answer.startswith("interrupt") and end == 4:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(300)


def talk(lines: list[str | type[BaseException]], **options: object) -> SimpleNamespace:
    llm, out = StreamingLLM(), io.StringIO()
    waiting = iter([*lines, EOFError])

    def read_line() -> str:
        line = next(waiting)
        if not isinstance(line, str):
            raise line
        return line

    conversation = Conversation("sys")
    console = Console(file=out, width=100)
    terminal = Terminal(LocalModel(llm, "m"), SamplingOptions(**options), conversation, console, read_line)
    with asyncio.Runner() as runner:
        terminal.run(runner)
    return SimpleNamespace(llm=llm, text=out.getvalue(), conversation=conversation)


def test_answers_stream_and_are_remembered():
    talked = talk(["hello [bold]", "", "again"], temperature=0.0, max_tokens=5000)
    assert talked.llm.prompts == [
        "<system>sys<user>hello [bold]", "<system>sys<user>hello [bold]<assistant>hello [bold]<user>again"
    ]
    assert "hello [bold]\n" in talked.text and "tokens" in talked.text
    assert talked.llm.params[0].temperature == 0.0
    assert talked.llm.params[0].max_tokens == 400 - len(talked.llm.prompts[0])


def test_tokens_a_step_are_shown_where_drafts_were_accepted():
    assert "a step" not in talk(["hello"]).text
    assert ", 2.0 a step\n" in talk(["drafted!"]).text


def test_commands():
    talked = talk(["one", "/reset", "two", "/system new", "three", "/system", "four", "/what", "/exit", "unread"])
    assert talked.llm.prompts == [
        "<system>sys<user>one", "<system>sys<user>two", "<system>new<user>three", "<user>four"
    ]
    assert "/what is no command. There are:\n/reset" in talked.text
    assert "no command" not in talk(["/help"]).text


def test_an_error_leaves_the_conversation_usable():
    talked = talk(["please fail", "fine"])
    assert "error: too long" in talked.text
    assert talked.llm.prompts[1] == "<system>sys<user>fine"


def test_ctrl_c_stops_the_answer_and_keeps_its_start():
    """In a process of its own: the signal goes to the main thread, which need not be the one that runs the tests."""
    ran = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    text, prompts = json.loads(ran.stdout)
    assert "stopped" in text
    assert prompts[1] == "<system>sys<user>interrupt me<assistant>inte<user>next"


@pytest.mark.parametrize("leaving", [EOFError, KeyboardInterrupt])
def test_leaving_at_the_prompt(leaving: type[BaseException]):
    assert talk([leaving]).llm.prompts == []


if __name__ == "__main__":
    # ignored where the tests themselves run in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = talk(["interrupt me", "next"])
    print(json.dumps([interrupted.text, interrupted.llm.prompts]))
