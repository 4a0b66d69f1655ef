"""What the log says of where a start's time went."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from headrace.service.stages import Stages


def test_stages_are_told_apart_and_added_up():
    now, told = 100.0, list[tuple[str, float]]()
    stages = Stages(lambda stage, fraction: told.append((stage, fraction)), began=98.0, clock=lambda: now)
    for stage, fraction, seconds in (
        ("importing", 0.0, 1.0), ("compiling CPU kernels: 0 of 2 files", 0.0, 2.0),
        ("compiling CPU kernels: 1 of 2 files", 0.05, 2.0), ("loading weights", 0.1, 0.25),
        ("choosing kernels", 0.2, 0.5), ("sizing the KV cache", 0.8, 0.04), ("loading weights", 0.3, 0.75),
    ):
        stages(stage, fraction)
        now += seconds
    assert stages.describe() == (
        "started in 8.5 s: importing 3.0, compiling CPU kernels 4.0, loading weights 1.0, choosing kernels 0.5"
    )
    assert told[1] == ("compiling CPU kernels: 0 of 2 files", 0.0) and len(told) == 7
    assert Stages(stages, now, clock=lambda: now).describe() == "started in 0.0 s"


def test_a_stage_is_repeated_as_a_sign_of_life():
    told = queue.SimpleQueue[tuple[str, float]]()
    stages = Stages(lambda *report: told.put(report), began=0.0, clock=lambda: 0.0)
    stages("loading weights: 1 of 2 files", 0.5)
    with stages.repeated(0.01):
        assert {told.get(timeout=20.0) for _ in range(3)} == {("loading weights: 1 of 2 files", 0.5)}


async def test_an_engine_logs_its_stages(
    start_client: Callable, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "info")  # whatever commands left that tests ran in this process
    await start_client()
    assert "INFO engine: started in " in capfd.readouterr().err
