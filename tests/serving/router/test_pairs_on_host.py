"""The servers of ``headrace serve --disaggregate``: which ends are final, and which are not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from headrace.base import env
from headrace.base.config import CacheConfig, EngineConfig, ServeConfig
from headrace.base.disaggregation import DisaggregationConfig
from headrace.base.errors import ConfigError, EngineUnavailable, HeadraceError
from headrace.base.parallel import DeviceConfig
from headrace.base.server_config import ServerConfig
from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import parse_command
from headrace.serving.cli.main import main
from headrace.serving.cli.serve import serve_config
from headrace.serving.router import pairs_on_host
from headrace.serving.router.options import RouterOptions, WorkerOptions
from headrace.serving.router.pairs_on_host import PairServers, serve_pairs

LIVES = """
import pathlib, sys, time
count = pathlib.Path(sys.argv[1])
starts = int(count.read_text()) if count.exists() else 0
count.write_text(str(starts + 1))
if starts < len(sys.argv) - 2:
    sys.exit(int(sys.argv[2 + starts]))
time.sleep(600)
"""
"""A server whose first lives end with the statuses of its arguments, and whose next one stays."""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> PairServers:
    monkeypatch.setattr(pairs_on_host, "RESTART_PAUSE_S", 0.0)
    monkeypatch.setattr(pairs_on_host, "WATCH_S", 0.01)
    config = ServeConfig(engine=EngineConfig(disaggregation=DisaggregationConfig(disaggregate="1:1")))
    made = PairServers(config)
    del made.roles[1:]
    return made


@dataclass
class Router:
    """What the router knows."""

    is_stopping: bool = False
    silent: float = 0.0

    def silent_s(self, url: str) -> float:
        return self.silent


async def until(condition) -> None:
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.01)


def count_starts(folder: Path) -> str:
    return (folder / "count").read_text() if (folder / "count").exists() else ""


def set_lives(servers: PairServers, folder: Path, *statuses: int) -> None:
    servers.roles[0].command = [sys.executable, "-c", LIVES, str(folder / "count"), *map(str, statuses)]


async def test_a_server_is_started_again_though_its_port_or_memory_lacks_for_a_while(
    servers: PairServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    set_lives(servers, tmp_path, 1, 2)
    servers.start()
    popen, lacks = subprocess.Popen, iter([OSError(12, "Cannot allocate memory")] * 8)

    def start(*arguments, **options):
        if error := next(lacks, None):
            raise error
        return popen(*arguments, **options)

    monkeypatch.setattr(pairs_on_host.subprocess, "Popen", start)
    watching = asyncio.create_task(servers.watch(Router()))
    try:
        await until(lambda: watching.done() or count_starts(tmp_path) == "3")
        assert not watching.done(), watching.exception()
        assert servers.roles[0].process.poll() is None
    finally:
        watching.cancel()
        servers.close()


async def test_a_stopped_server_is_replaced_and_none_while_the_command_ends(servers: PairServers, tmp_path: Path):
    set_lives(servers, tmp_path)
    servers.start()
    first, router = servers.roles[0].process, Router()
    watching = asyncio.create_task(servers.watch(router))
    try:
        await until(lambda: count_starts(tmp_path) == "1")
        os.kill(first.pid, signal.SIGSTOP)
        router.silent = 19.0
        await asyncio.sleep(0.1)
        assert first.poll() is None, "it may be slow"
        router.silent = 20.0
        await until(lambda: servers.roles[0].process is not first)
        router.silent = 0.0
        assert first.returncode == -signal.SIGKILL
        await until(lambda: count_starts(tmp_path) == "2")
        router.is_stopping = True
        servers.roles[0].process.kill()  # as a service manager signals all processes at once
        await asyncio.sleep(0.1)
        assert count_starts(tmp_path) == "2" and not watching.done()
    finally:
        watching.cancel()
        servers.close()


def test_servers_end_with_the_command_also_when_they_are_stopped(tmp_path: Path):
    script = """
        import sys, time
        from headrace.base.config import EngineConfig, ServeConfig
        from headrace.base.disaggregation import DisaggregationConfig
        from headrace.serving.router.pairs_on_host import PairServers
        servers = PairServers(ServeConfig(engine=EngineConfig(disaggregation=DisaggregationConfig(disaggregate="1:1"))))
        for role in servers.roles:
            role.command = [sys.executable, "-c", "import time; time.sleep(600)"]
        servers.start()
        print(*(role.process.pid for role in servers.roles), flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}) as main_process:
        own = [psutil.Process(int(pid)) for pid in main_process.stdout.readline().split()]
        own[0].suspend()
        main_process.kill()
    _, alive = psutil.wait_procs(own, timeout=10)
    assert not alive and not list(tmp_path.iterdir())


@pytest.mark.parametrize("statuses", [[2], [1] * 9])
async def test_wrong_options_and_too_many_ends_are_final(servers: PairServers, tmp_path: Path, statuses: list[int]):
    set_lives(servers, tmp_path, *statuses)
    servers.start()
    try:
        with pytest.raises(ConfigError, match=f"ended with status {statuses[0]}"):
            await servers.watch(Router())
    finally:
        servers.close()
    assert count_starts(tmp_path) == ("1" if statuses == [2] else "6")


@pytest.mark.parametrize(("error", "status"), [
    (EngineUnavailable("the engine process ended with exit code -9"), 1), (ConfigError("no such model"), 2),
])
def test_a_server_whose_engine_is_lost_does_not_end_as_one_with_wrong_options(
    error: HeadraceError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class NoEngine:
        def __init__(self, config: EngineConfig): ...

        def end(self) -> None:
            """Nothing was started."""

    def serve(*arguments, **options):
        raise error

    monkeypatch.setattr("headrace.serving.cli.serve.spawn_engine", NoEngine)
    monkeypatch.setattr("headrace.serving.http.server.serve", serve)
    assert main(["serve", "some/model"]) == status
    assert error.message in capsys.readouterr().err


@pytest.mark.parametrize(("visible", "expected"), [
    (None, ["0", "1"]), ("3,5", ["3", "5"]), ("GPU-a, GPU-b,2", ["GPU-a", "GPU-b"]), ("", ["", ""]), ("-1", ["", ""]),
], ids=str)
def test_each_server_sees_a_gpu_of_its_own(visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [env.one_device(index)["CUDA_VISIBLE_DEVICES"] for index in range(2)] == expected


def test_servers_share_no_folder_and_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Their own commands read these options, and nothing of the environment that set options of this one."""
    cache = CacheConfig(
        disk_cache=str(tmp_path / "kv"), disk_cache_gb=3.0, host_cache_gb=0.5,
        kv_events_config='{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557", "topic": "kv"}',
    )
    roles = DisaggregationConfig(disaggregate="2:1")
    device = DeviceConfig(device="cpu", threads=1)
    server = ServerConfig(api_key="secret", admin_api_key="other")
    config = ServeConfig(engine=EngineConfig(cache=cache, disaggregation=roles, device=device), server=server)
    servers, started = PairServers(config), []

    def start(command: list[str], *, stdin, env, **_) -> None:
        assert command[command.index("serve") + 1 :] == ["--config", "/dev/stdin"]
        started.append((stdin.read(), env))

    monkeypatch.setattr(pairs_on_host.subprocess, "Popen", start)
    for name, value in (("HEADRACE_API_KEY", "secret"), ("OMP_NUM_THREADS", "3")):
        monkeypatch.setenv(name, value)
    servers.start()
    assert [role.name for role in servers.roles] == ["prefill", "prefill", "decode"]
    read = []
    for options, environment in started:
        (tmp_path / "options").write_bytes(options)
        for name in env.OPTIONS:
            monkeypatch.setenv(name, environment[name]) if name in environment else monkeypatch.delenv(name, False)
        read.append(serve_config(parse_command(COMMANDS["serve"], ["--config", str(tmp_path / "options")])))
    assert [config.engine.device.threads for config in read] == [1] * 3
    keys = [(config.server.api_key, config.server.admin_api_key) for config in read]
    assert keys == [("secret", "other")] * 3, "users of this host reach their ports"
    own = [config.engine.cache for config in read]
    folders = [str(tmp_path / "kv" / name) for name in ("prefill-0", "prefill-1", "decode-2")]
    assert [cache.disk_cache for cache in own] == folders
    assert [(cache.disk_cache_gb, cache.host_cache_gb) for cache in own] == [(1.0, 0.5)] * 3
    events = [cache.kv_events for cache in own]
    assert events[2] is None, "prompts are sent where a prefill server has them"
    for index, options in enumerate(events[:2]):
        assert options is not None and options.topic == "kv"
        assert (options.endpoint, options.replay_endpoint) == (f"tcp://*:{5557 + index}", f"tcp://*:{6557 + index}")


def test_the_router_has_the_key_of_its_servers(monkeypatch: pytest.MonkeyPatch):
    class Routed(Exception):
        """Carries what a router was made of."""

    def route(urls: list[str], options: RouterOptions, workers: WorkerOptions, **_) -> None:
        raise Routed(options.api_key, workers.worker_api_key)

    monkeypatch.setattr(pairs_on_host, "RouterServer", route)
    monkeypatch.setattr(PairServers, "start", lambda self: None)
    roles = DisaggregationConfig(disaggregate="1:1")
    for key in (None, "secret"):
        with pytest.raises(Routed) as found:
            serve_pairs(ServeConfig(engine=EngineConfig(disaggregation=roles), server=ServerConfig(api_key=key)))
        assert found.value.args == (key, key)


@pytest.mark.parametrize("visible", ["4", "4,-1,5"])
def test_no_server_takes_a_gpu_that_is_hidden(visible: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    roles = DisaggregationConfig(disaggregate="1:1")
    with pytest.raises(ConfigError, match="2 servers take a GPU each, and CUDA_VISIBLE_DEVICES names 1"):
        PairServers(ServeConfig(engine=EngineConfig(disaggregation=roles)))
    on_cpu = EngineConfig(disaggregation=roles, device=DeviceConfig(device="cpu"))
    assert len(PairServers(ServeConfig(engine=on_cpu)).roles) == 2
