"""The servers of ``headrace serve --disaggregate``: which ends are final, and which are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base import env
from headrace.base.config import CacheConfig, EngineConfig, ServeConfig
from headrace.base.disaggregation import DisaggregationConfig
from headrace.base.errors import ConfigError, EngineUnavailable, HeadraceError
from headrace.base.parallel import DeviceConfig
from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import parse_command
from headrace.serving.cli.main import main
from headrace.serving.cli.serve import serve_config
from headrace.serving.router import pairs_on_host
from headrace.serving.router.pairs_on_host import PairServers

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
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairServers:
    monkeypatch.setattr(pairs_on_host, "RESTART_PAUSE_S", 0.0)
    monkeypatch.setattr(pairs_on_host, "WATCH_S", 0.01)
    config = ServeConfig(engine=EngineConfig(disaggregation=DisaggregationConfig(disaggregate="1:1")))
    made = PairServers(config, tmp_path)
    del made.roles[1:]
    return made


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
    watching = asyncio.create_task(servers.watch())
    try:
        while not watching.done() and count_starts(tmp_path) != "3":
            await asyncio.sleep(0.01)
        assert not watching.done(), watching.exception()
        assert servers.roles[0].process.poll() is None
    finally:
        watching.cancel()
        servers.close(0.0)


@pytest.mark.parametrize("statuses", [[2], [1] * 9])
async def test_wrong_options_and_too_many_ends_are_final(servers: PairServers, tmp_path: Path, statuses: list[int]):
    set_lives(servers, tmp_path, *statuses)
    servers.start()
    try:
        with pytest.raises(ConfigError, match=f"ended with status {statuses[0]}"):
            await servers.watch()
    finally:
        servers.close(0.0)
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


def test_servers_share_no_folder_and_no_port(tmp_path: Path):
    """Their own commands read these files."""
    cache = CacheConfig(
        disk_cache=str(tmp_path / "kv"), disk_cache_gb=3.0, host_cache_gb=0.5,
        kv_events_config='{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557", "topic": "kv"}',
    )
    roles = DisaggregationConfig(disaggregate="2:1")
    config = ServeConfig(engine=EngineConfig(cache=cache, disaggregation=roles, device=DeviceConfig(device="cpu")))
    servers = PairServers(config, tmp_path)
    assert [role.name for role in servers.roles] == ["prefill", "prefill", "decode"]
    own = [
        serve_config(parse_command(COMMANDS["serve"], role.command[role.command.index("serve") + 1 :])).engine.cache
        for role in servers.roles
    ]
    folders = [str(tmp_path / "kv" / name) for name in ("prefill-0", "prefill-1", "decode-2")]
    assert [cache.disk_cache for cache in own] == folders
    assert [(cache.disk_cache_gb, cache.host_cache_gb) for cache in own] == [(1.0, 0.5)] * 3
    events = [cache.kv_events for cache in own]
    assert events[2] is None, "prompts are sent where a prefill server has them"
    for index, options in enumerate(events[:2]):
        assert options is not None and options.topic == "kv"
        assert (options.endpoint, options.replay_endpoint) == (f"tcp://*:{5557 + index}", f"tcp://*:{6557 + index}")


@pytest.mark.parametrize("visible", ["4", "4,-1,5"])
def test_no_server_takes_a_gpu_that_is_hidden(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    roles = DisaggregationConfig(disaggregate="1:1")
    with pytest.raises(ConfigError, match="2 servers take a GPU each, and CUDA_VISIBLE_DEVICES names 1"):
        PairServers(ServeConfig(engine=EngineConfig(disaggregation=roles)), tmp_path)
    on_cpu = EngineConfig(disaggregation=roles, device=DeviceConfig(device="cpu"))
    assert len(PairServers(ServeConfig(engine=on_cpu), tmp_path).roles) == 2
