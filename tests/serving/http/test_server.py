"""The server process: start-up, signals, exit codes, the bound on request heads."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_apps import events_of, httpx
from fake_client import FakeClient
from rich.console import Console

from headrace.base.config import ServeConfig
from headrace.base.errors import ConfigError
from headrace.base.server_config import ServerConfig
from headrace.serving.http import server
from headrace.serving.http.listening import address_of, open_listener
from headrace.serving.http.server import announce_ready, format_bytes, read_template, serve

PATIENCE_S = 120.0
SCRIPT = Path(__file__).with_name("server_process.py")


class Running:
    """A server process and what it has printed so far."""

    def __init__(self, process: subprocess.Popen):
        self.process = process
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = re.search(pattern, self.output)
            if found:
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in:\n{self.output}")

    def finish(self) -> tuple[int, str]:
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code, self.output


@contextmanager
def running(*, delay_s: float = 0.0, drain_s: float = 10.0, mode: str = "fine") -> Iterator[Running]:
    command = [sys.executable, str(SCRIPT), str(delay_s), str(drain_s), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def test_start_and_orderly_end():
    with running() as server:
        address = server.wait_for(r"http://127\.0\.0\.1:\d+")
        server.wait_for("curl http")
        assert httpx.get(address + "/ready", timeout=PATIENCE_S).status_code == 200
        assert "KV cache" in server.output and "2.00 MiB" in server.output and "chat page" in server.output
        server.process.send_signal(signal.SIGTERM)
        code, output = server.finish()
        assert code == 0 and "Traceback" not in output and "never retrieved" not in output, output
        # Once ready, collections of garbage leave alone what was imported.
        assert re.search(r"frozen objects: [1-9]\d{4}", output)


@contextmanager
def one_stream(server: Running, max_tokens: int) -> Iterator[tuple[str, httpx.Response]]:
    server.wait_for("curl http")
    address = server.wait_for(r"http://127\.0\.0\.1:\d+")
    body = {"prompt": "go", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", address + "/v1/completions", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        yield address, response


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones():
    with running(delay_s=0.02, drain_s=PATIENCE_S) as server, one_stream(server, 4000) as (address, response):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("shutting down: 1 requests running")
        refused = httpx.post(address + "/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert httpx.get(address + "/ready", timeout=PATIENCE_S).status_code == 503
        server.process.send_signal(signal.SIGUSR1)
        frames = events_of(response.read().decode())
        assert frames[-1] == "[DONE]" and '"finish_reason":"length"' in frames[-2]
        assert server.finish()[0] == 0


def test_drain_has_a_deadline():
    with running(delay_s=0.05, drain_s=0.3) as server, one_stream(server, 3000) as (_, response):
        server.process.send_signal(signal.SIGINT)
        frames = events_of(response.read().decode())
        assert "shutting down" in frames[-2] and frames[-1] == "[DONE]"
        assert server.finish()[0] == 0


def test_second_signal_ends_at_once():
    with running(delay_s=0.05, drain_s=100) as server, one_stream(server, 3000) as (_, response):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("shutting down")
        server.process.send_signal(signal.SIGTERM)
        assert server.finish()[0] == 1
        assert "[DONE]" in response.read().decode()


def test_an_engine_that_cannot_start_or_is_given_up_ends_the_server():
    with running(mode="broken") as server:
        assert server.finish() == (1, server.output) and "error: no such model" in server.output
    with running(mode="crashing") as server:
        code, output = server.finish()
        assert code == 1 and "not restarted" in output and "Traceback" not in output


def test_while_the_model_is_loading_health_answers_and_sigterm_ends():
    with running(mode="slow") as server:
        address = server.wait_for(r"http://127\.0\.0\.1:\d+")
        assert tuple(
            httpx.get(address + path, timeout=PATIENCE_S).status_code for path in ("/health", "/ready")
        ) == (200, 503)
        server.process.send_signal(signal.SIGTERM)
        code, output = server.finish()
        assert code == 0 and "Traceback" not in output and "never retrieved" not in output, output


def test_endless_request_heads_are_cut_off():
    with running() as server:
        address = server.wait_for(r"127\.0\.0\.1:\d+")
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
            answer = b""
            try:
                for _ in range(400):
                    client.sendall(b"a" * 1000 + b": b\r\n")
                answer = client.recv(4096)
            except (BrokenPipeError, ConnectionResetError):
                answer = b"HTTP/1.1 431 (or the connection was reset)"
            assert answer.startswith(b"HTTP/1.1 431")
        kept = httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_S)
        assert all(kept.get("/health", headers={"x": "y" * 20_000}).status_code == 200 for _ in range(8)), (
            "the bound is for each request"
        )
        kept.close()


def has_both_protocols() -> bool:
    """Whether the system has IPv6 in one socket with IPv4, and this machine an address of it: many containers have
    none."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


def test_addresses():
    with open_listener(ServerConfig(port=0, host="0.0.0.0")) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"cannot listen on 0.0.0.0 port {port}: address already in use; choose"):
            open_listener(ServerConfig(port=port, host="0.0.0.0"))
    if has_both_protocols():
        with open_listener(ServerConfig(port=0, host="::")) as listener:
            for host in ("127.0.0.1", "::1"):
                socket.create_connection((host, listener.getsockname()[1]), timeout=PATIENCE_S).close()
    with pytest.raises(ConfigError, match="no-such-host"):
        open_listener(ServerConfig(host="no-such-host.invalid"))


def test_chat_template_file(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ x }}")
    assert read_template(str(tmp_path / "t.jinja")) == "{{ x }}" and read_template(None) is None
    with pytest.raises(ConfigError, match="chat_template"):
        serve(ServeConfig(server=ServerConfig(chat_template=str(tmp_path / "none"))))


def test_announcement(caplog: pytest.LogCaptureFixture):
    console = Console(width=60, file=(printed := io.StringIO()))
    client = FakeClient()
    announce_ready(
        console, address="http://h:1", name="[red]m'", facts=client.facts, memory=client.memory, has_key=True,
        tokenizer=client.tokenizer
    )
    text = printed.getvalue()
    command = "curl http://h:1/v1/chat/completions -H 'Content-Type: application/json' -H 'Authorization: Bearer KEY'"
    assert command in text
    assert "[red]m' is ready" in text
    for tokenizer, asked in (
        (SimpleNamespace(has_chat_template=False), '"prompt": "The capital'), (None, '"prompt": [1, 2, 3]')
    ):
        announce_ready(
            console, address="http://h:1", name="m", facts=client.facts, memory=[], has_key=False, tokenizer=tokenizer
        )
        text = printed.getvalue()
        assert "curl http://h:1/v1/completions " in text and asked in text
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="ascii") as unread, caplog.at_level("WARNING"):
        announce_ready(
            Console(file=unread), address="http://h:1", name="ü", facts=client.facts, memory=[], has_key=False,
            tokenizer=None
        )
    assert "ready on http://h:1; the standard output cannot be written to: [Errno 32] Broken pipe" in caplog.text
    assert [format_bytes(n) for n in (5, 2048, 3 * 2**30)] == ["5 B", "2.00 KiB", "3.00 GiB"]


def test_threads_leave_the_interpreter_to_the_event_loop_soon(monkeypatch: pytest.MonkeyPatch):
    found: list[float] = []

    class Measured:
        """In place of a server: how long one turn of the loop takes while a thread computes."""

        def __init__(self, config: ServeConfig, client: object):
            pass

        async def run(self) -> None:
            is_over = threading.Event()
            thread = threading.Thread(target=lambda: [None for _ in iter(is_over.is_set, True)])
            thread.start()
            for _ in range(40):
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                found.append(time.perf_counter() - began)
            is_over.set()
            thread.join()

    monkeypatch.setattr(server, "HttpServer", Measured)
    before = sys.getswitchinterval()
    try:
        serve(ServeConfig())
    finally:
        sys.setswitchinterval(before)
    assert statistics.median(found) < 0.004
