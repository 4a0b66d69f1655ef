"""Sleep on a GPU: memory falls by what left, graphs are captured anew, and greedy output is the same after waking."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driver import Driver
from tiny_checkpoint import write_tiny_checkpoint

from headrace.base.admin import DEVICE_PARTS
from headrace.base.config import engine_config
from headrace.base.errors import EngineAsleep, WeightError
from headrace.base.sampling import SamplingSpec
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor
from headrace.execution.sleep import sweep

pytestmark = pytest.mark.cuda

NUM_PAGES, PAGE_SIZE = 40_000, 64
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 32_000, "max_position_embeddings": 2048
}
SLACK = 64 * 2**20
"""What libraries keep for themselves."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {name: write_tiny_checkpoint(home / name, seed, **SHAPE) for name, seed in (("first", 1), ("second", 2))}


def build(folder: Path, *, graphs: str = "on") -> LocalExecutor:
    """Over a device of which this process holds nothing that earlier tests have left in torch's cache."""
    sweep(torch.device("cuda"))
    return build_executor(engine_config(
        model=str(folder), device="cuda", dtype="float32", kv_pages=NUM_PAGES, page_size=PAGE_SIZE,
        max_running_requests=8, max_step_tokens=512,
        graphs=graphs, attention_backend="triton",
    ))


@pytest.fixture(params=["on", "lazy", "off"])
def executor(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[LocalExecutor]:
    built = build(folders["first"], graphs=request.param)
    yield built
    built.close()


def speak(executor: LocalExecutor, steps: int = 24) -> list[list[int]]:
    """Greedy continuations of five prompts, on a device that knows nothing of earlier ones."""
    driver = Driver(executor, num_pages=400, page_size=PAGE_SIZE, num_groups=1)
    for row in range(5):
        driver.start(row, random.Random(row).choices(range(SHAPE["vocab_size"]), k=20 + 31 * row), SamplingSpec())
    for _ in range(steps):
        driver.step(dict.fromkeys(range(5), 512))
    for row in range(5):
        driver.release(row)
    executor.execute(driver.plan({})).result()
    return [driver.output[row] for row in range(5)]


def used_bytes() -> int:
    torch.cuda.synchronize()
    gc.collect()
    free, total = torch.cuda.mem_get_info()
    return total - free


def lines(executor: LocalExecutor) -> dict[str, int]:
    return {line.name: line.num_bytes for line in executor.memory}


@pytest.mark.parametrize("discards", [False, True])
def test_memory_falls_and_output_is_the_same(executor: LocalExecutor, discards: bool):
    expected, sizes = speak(executor), lines(executor)
    before = used_bytes()
    for _ in range(2):
        executor.release_memory(["kv_cache"])
        assert before - used_bytes() >= sizes["KV full"] - SLACK, "the pools are still there"
        executor.release_memory(DEVICE_PARTS, discards_weights=discards)
        asleep = used_bytes()
        assert before - asleep >= sizes["KV full"] + sizes["weights"] - SLACK, "the weights are still there"
        executor.acquire_memory(["weights"])
        assert sizes["weights"] - SLACK <= used_bytes() - asleep <= sizes["weights"] + 4 * SLACK
        executor.acquire_memory(DEVICE_PARTS)
        assert abs(used_bytes() - before) <= 4 * SLACK, "it takes as much as before"
        assert speak(executor) == expected


def test_graphs_are_captured_anew(folders: dict[str, Path]):
    executor = build(folders["first"])
    expected = speak(executor)
    assert executor._runner._captured is not None
    executor.release_memory(["cuda_graph"])
    assert executor._runner._captured is None and speak(executor) == expected
    executor.acquire_memory(["cuda_graph"])
    assert executor._runner._captured is not None and speak(executor) == expected
    executor.close()


def test_weights_are_replaced_under_graphs(executor: LocalExecutor, folders: dict[str, Path], tmp_path: Path):
    first, before = speak(executor), used_bytes()
    executor.replace_weights(str(folders["second"]), "auto")
    second = speak(executor)
    other = build(folders["second"])
    assert second == speak(other) != first
    other.close()
    broken = write_tiny_checkpoint(tmp_path, 3, **SHAPE)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(WeightError):
        executor.replace_weights(str(broken), "auto")
    assert speak(executor) == second, "the old weights are back on the device"
    executor.replace_weights(str(folders["first"]), "auto")
    assert speak(executor) == first and abs(used_bytes() - before) <= 4 * SLACK


def test_no_room_to_wake(folders: dict[str, Path]):
    executor = build(folders["first"])
    expected = speak(executor)
    executor.release_memory(DEVICE_PARTS)
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 300 * 2**20, dtype=torch.uint8, device="cuda")
    with pytest.raises(EngineAsleep, match="no room"):
        executor.acquire_memory(DEVICE_PARTS)
    assert "kv_cache" in executor.released
    del hog
    torch.cuda.empty_cache()
    executor.acquire_memory(DEVICE_PARTS)
    assert speak(executor) == expected
    executor.close()
