"""Ranks on several hosts: agents that connect over TCP, in processes of their own on this machine."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fakes import PATIENCE_S, RecordingExecutor, continuation, engine_over
from test_ranks import run

from headrace.base.config import EngineConfig, engine_config
from headrace.base.errors import ConfigError, EngineBroken, EngineUnavailable, HeadraceError
from headrace.service.ranks import agent as agents
from headrace.service.ranks import remote, wire
from headrace.service.ranks.agent import NodeAgent, connect
from headrace.service.ranks.build import find_interface
from headrace.service.ranks.executor import RankedExecutor
from headrace.service.ranks.heartbeats import SILENCE_S
from headrace.service.ranks.nodes import NodeLauncher, shared_options
from headrace.service.ranks.remote import Listener
from headrace.service.ranks.wire import find_fingerprint
from headrace.service.ranks.workers import Workers

MASTER = "127.0.0.2"
"""Another address of this machine than that which the agents have."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((MASTER, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def hosts(config_only: Path, tmp_path: Path) -> Callable[..., EngineConfig]:
    """Options of a host."""
    (tmp_path / "token").write_text("0123456789abcdef\n")
    port = free_port()

    def make(node_rank: int = 0, size: int = 4, nnodes: int = 2, **options: object) -> EngineConfig:
        return engine_config(**{
            "model": str(config_only), "skip_tokenizer": True, "tensor_parallel_size": size, "nnodes": nnodes,
            "load_format": "dummy", "node_rank": node_rank, "master_addr": MASTER, "master_port": port,
            "node_token_file": str(tmp_path / "token"), **options,
        })

    return make


class Agent:
    """A `NodeAgent` on a thread; its workers are children of this process."""

    def __init__(self, config: EngineConfig, join_s: float = PATIENCE_S):
        self.end: queue.SimpleQueue[HeadraceError | None] = queue.SimpleQueue()
        self._agent = NodeAgent(config, join_s=join_s)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._agent.run()
            self.end.put(None)
        except HeadraceError as error:
            self.end.put(error)

    def wait(self) -> HeadraceError | None:
        return self.end.get(timeout=PATIENCE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Workers, RankedExecutor]]]:
    """Starts the ranks of host 0, of fakes."""
    started: list[Workers] = []

    def start_ranks(
        config: EngineConfig, on_failure: Callable[[HeadraceError], object] = lambda _: None
    ) -> tuple[Workers, RankedExecutor]:
        size = config.parallel.num_ranks
        launcher = NodeLauncher(config, size, lambda *_: None, "fakes:build_fake_rank")
        workers = Workers(config, size, launcher, on_failure=on_failure)
        started.append(workers)
        workers.assign(1)
        try:
            workers.await_ready()
        except HeadraceError:
            workers.close()
            raise
        return workers, RankedExecutor(RecordingExecutor(config, 0), workers, ExitStack())

    yield start_ranks
    for workers in started:
        workers.close()


def worker_processes() -> list[psutil.Process]:
    return [c for c in psutil.Process().children(True) if "headrace.service.ranks.worker" in c.cmdline()]


def test_ranks_of_three_hosts_carry_out_the_same(hosts, start, config_only: Path):
    others = [Agent(hosts(node, size=6, nnodes=3)) for node in (2, 1)]
    workers, executor = start(hosts(size=6, nnodes=3))
    engine = engine_over(executor)
    prompt = list(range(100)) * 20
    assert run(engine, prompt, 5) == continuation(prompt, 5)
    engine.drain()
    executor.replace_weights("9", "dummy")
    assert len(worker_processes()) == 5 and workers.num_hosts == 3
    executor.close()
    assert [other.wait() for other in others] == [None, None], "the engine has ended, and is not waited for"
    own, *rest = [(config_only / f"rank-{rank}").read_text().splitlines() for rank in range(6)]
    assert all(lines == own for lines in rest) and sum("execute" in line for line in own) >= 5


def test_places_of_ranks_on_their_hosts(hosts):
    launcher = NodeLauncher(replace(hosts(size=6, nnodes=3, data_parallel_size=2), replica=1), 6, lambda *_: None)
    assert (launcher.place.index, launcher.place.count) == (2, 4)
    assert {rank: place.index for rank, place in launcher._places(0).items()} == {1: 3}
    assert {rank: place.index for rank, place in launcher._places(2).items()} == {4: 2, 5: 3}


@pytest.mark.parametrize(("options", "says"), [
    ({"size": 3}, "3 ranks cannot be divided evenly among 2 hosts"),
    ({"node_rank": 1}, "run on it: headrace serve"),
])
def test_ranks_that_cannot_be_placed(hosts, options: dict, says: str):
    config = hosts(**options)
    with pytest.raises(ConfigError, match=says):
        NodeLauncher(config, config.parallel.tensor_parallel_size, lambda *_: None)


@pytest.mark.parametrize(("options", "says"), [
    ({"node_rank": 2}, "at most 1"), ({"node_token_file": None}, "openssl rand"), ({"executor": "ray"}, "leave nnodes"),
])
def test_options_that_do_not_go_together(hosts, options: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        hosts(**options)


def test_a_host_that_differs_is_told_so_and_another_may_come(hosts, start, tmp_path: Path, monkeypatch):
    """Other options, another token, another model, another version; the engine goes on waiting meanwhile."""
    (tmp_path / "guess").write_text("another-token-of-32-characters..")
    other_model = tmp_path / "other"
    other_model.mkdir()
    (other_model / "config.json").write_text('{"architectures": ["Fake"], "hidden_size": 7}')
    same_model = tmp_path / "same"
    same_model.mkdir()
    (same_model / "config.json").write_text((tmp_path / "config.json").read_text())
    wrong = [
        (Agent(hosts(1, max_model_len=77, seed=5)), "max_model_len is 77 there and None on host 0, seed is 5"),
        (Agent(hosts(1, node_token_file=str(tmp_path / "guess"))), "token of this host is another"),
        (Agent(hosts(1, model=str(other_model))), ""),
    ]
    result: queue.SimpleQueue[RankedExecutor] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: result.put(start(hosts())[1]), daemon=True)
    thread.start()
    for agent, says in wrong[:2]:
        error = agent.wait()
        assert isinstance(error, ConfigError) and says in error.message
    # its own files are others, but it has those of host 0 too
    result.get(timeout=PATIENCE_S).close()
    assert wrong[2][0].wait() is None
    with pytest.raises(ConfigError, match="is another than"):
        agents.find_model(
            hosts(1, model=str(other_model)), wire.Begin("", {}, "", hosts(model=str(other_model)), "none")
        )
    begin = wire.Begin("", {}, "", hosts(model="not-here"), find_fingerprint(hosts()))
    assert agents.find_model(hosts(1, model=str(same_model)), begin) == str(same_model)


def test_models_are_told_apart_by_their_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["Fake"]}')
    weights = tmp_path / "model.safetensors"
    config = engine_config(model=str(tmp_path))
    prints = []
    middle = b"a" * 1_500_000 + b"b" * 500_000 + b"a" * 1_000_000
    for content in (b"a" * 3_000_000, b"a" * 2_999_999 + b"b", b"b" + b"a" * 2_999_999, b"a" * 3_000_001, middle):
        weights.write_bytes(content)
        prints.append(find_fingerprint(config))
    assert len(set(prints)) == 5


def test_only_who_knows_the_token_gets_in(hosts, start, tmp_path: Path):
    """Neither noise nor a long message nor a wrong proof takes part, or keeps those who may."""
    config = hosts()
    address = (MASTER, config.nodes.master_port)
    thread = threading.Thread(target=lambda: start(config), daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            idle = socket.create_connection(address, timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff\xff\xff\xff" + b"x" * 100, b"\x03\x00\x00\x00abc"):
        with socket.create_connection(address, timeout=5) as line:
            line.sendall(noise)
            with contextlib.suppress(ConnectionResetError):
                while line.recv(4096):
                    pass
    with pytest.raises(ConfigError, match="token of this host"):
        connect(address, b"0123456789abcdeg", 1, options=shared_options(config))
    with pytest.raises(ConfigError, match="has Headrace 0"):
        connect(address, b"0123456789abcdef", 1, options=shared_options(config), version="0.0.0.9")
    with pytest.raises(ConfigError, match="host 2 is none of 1 to 1"):
        connect(address, b"0123456789abcdef", 2, options=shared_options(config))
    agent = Agent(hosts(1))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    idle.close()
    assert agent.end.empty()


def test_a_server_that_does_not_know_the_token_is_refused():
    """An agent starts nothing for an engine that cannot prove itself."""
    ours, its = socket.socketpair()

    def pretend() -> None:
        its.sendall(wire.frame(wire.Challenge(b"n" * 32)))
        wire.read_greeting(its)
        its.sendall(wire.frame(wire.Welcome(b"p" * 32)))

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(ConfigError, match="does not know the token"):
        wire.greet(ours, b"t" * 16, lambda nonce, proof: wire.Hello(nonce, proof, 1))
    ours.close()
    its.close()


def test_tokens_that_could_be_guessed_are_refused(tmp_path: Path):
    (tmp_path / "short").write_text("secret")
    for path, says in ((tmp_path / "short", "openssl rand"), (tmp_path / "none", "cannot read")):
        with pytest.raises(ConfigError, match=says):
            wire.read_token(str(path))


def test_a_dead_worker_of_another_host_is_noticed_within_a_second_and_the_host_serves_again(hosts, start):
    failures: queue.SimpleQueue[HeadraceError] = queue.SimpleQueue()
    agent = Agent(hosts(1, size=2))
    workers, executor = start(hosts(size=2), failures.put)
    assert len(worker_processes()) == 1, "host 0 has rank 0 alone"
    assert run(engine_over(executor), [1, 2, 3], 2) == continuation([1, 2, 3], 2)
    process = worker_processes()[0]
    process.kill()
    error = failures.get(timeout=1.5)
    assert isinstance(error, EngineBroken)
    assert f"rank 1 (pid {process.pid} on host 1, 127.0.0." in error.message
    assert "died with signal 9 (SIGKILL) while carrying out" in error.message
    with pytest.raises(EngineBroken):
        executor.reset()
    for host in workers._hosts:  # as when the process of rank 0 ends at once
        host._line.shutdown(socket.SHUT_RDWR)
    workers.close()
    _, executor = start(hosts(size=2))  # the engine is started again
    assert run(engine_over(executor), [4, 5], 3) == continuation([4, 5], 3)
    executor.close()
    assert agent.wait() is None


def test_an_engine_that_cannot_start_ends_its_hosts(hosts, start):
    agent = Agent(hosts(1, size=2, revision="raises"))
    with pytest.raises(HeadraceError, match="a tensor is missing"):
        start(hosts(size=2, revision="raises"))
    error = agent.wait()
    assert isinstance(error, EngineUnavailable) and "the log of host 0 says why" in error.message


def test_an_agent_gives_up_waiting(hosts):
    agent = Agent(hosts(1), join_s=0.1)
    error = agent.wait()
    assert isinstance(error, EngineUnavailable) and "--master-addr" in error.message


def test_an_engine_that_stands_still_is_left(hosts, caplog: pytest.LogCaptureFixture):
    """Its connection is open, and nothing comes."""
    config = hosts(1)
    listener = Listener(MASTER, config.nodes.master_port, b"0123456789abcdef", lambda hello: None)
    agent, began = Agent(config), time.monotonic()
    first = listener.arrivals.get(timeout=PATIENCE_S)
    second = listener.arrivals.get(timeout=SILENCE_S + 10)  # it tries another one
    assert time.monotonic() - began > SILENCE_S / 2 and agent.end.empty()
    assert first.hello.node == second.hello.node == 1
    for arrival in (first, second):
        arrival.line.close()
    listener.close()


def test_an_agent_that_stands_still_is_waited_for_again(
    hosts, start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It has said who it is, and starts no worker."""
    monkeypatch.setattr(remote, "START_SILENCE_S", 0.4)
    config, result = hosts(1, size=2), queue.SimpleQueue[RankedExecutor]()
    threading.Thread(target=lambda: result.put(start(hosts(size=2))[1]), daemon=True).start()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            line = connect((MASTER, config.nodes.master_port), b"0123456789abcdef", 1, options=shared_options(config))
            break
        time.sleep(0.02)
    while "its agent has gone" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "127.0.0.1 gives no sign of life" in caplog.text
    monkeypatch.undo()
    agent = Agent(config)
    result.get(timeout=PATIENCE_S).close()
    assert agent.wait() is None
    line.close()


def test_what_a_start_waits_for_is_told(hosts, start, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    result: queue.SimpleQueue[RankedExecutor] = queue.SimpleQueue()
    threading.Thread(target=lambda: result.put(start(hosts(size=3, nnodes=3))[1]), daemon=True).start()
    agents = []
    for node in (1, 2):
        deadline = time.monotonic() + PATIENCE_S
        awaited = "waiting for host 1, 2 " if node == 1 else "waiting for host 2"
        while not any(awaited in record.getMessage() for record in caplog.records):
            assert time.monotonic() < deadline, awaited
            time.sleep(0.02)
        agents.append(Agent(hosts(node, size=3, nnodes=3)))
    result.get(timeout=PATIENCE_S).close()
    assert [agent.wait() for agent in agents] == [None, None]


def test_interfaces():
    assert find_interface("127.0.0.1") == "lo" == find_interface(MASTER)
