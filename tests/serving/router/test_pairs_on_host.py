"""The servers of ``headrace serve --disaggregate``: which ends are final, and which are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base import env
from headrace.base.config import EngineConfig, ServeConfig
from headrace.base.disaggregation import DisaggregationConfig
from headrace.base.errors import ConfigError, EngineUnavailable, HeadraceError
from headrace.base.parallel import DeviceConfig
from headrace.serving.cli.main import main
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


@pytest.mark.parametrize("visible", ["4", "4,-1,5"])
def test_no_server_takes_a_gpu_that_is_hidden(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    roles = DisaggregationConfig(disaggregate="1:1")
    with pytest.raises(ConfigError, match="2 servers take a GPU each, and CUDA_VISIBLE_DEVICES names 1"):
        PairServers(ServeConfig(engine=EngineConfig(disaggregation=roles)), tmp_path)
    on_cpu = EngineConfig(disaggregation=roles, device=DeviceConfig(device="cpu"))
    assert len(PairServers(ServeConfig(engine=on_cpu), tmp_path).roles) == 2
