"""Parts of a model leave the device and come back; weights are replaced, or stay when that fails. On a CPU, over real
files."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driver import Driver
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tiny_checkpoint

from headrace.base.admin import DEVICE_PARTS, StartProfile
from headrace.base.config import engine_config
from headrace.base.errors import Conflict, EngineAsleep, HeadraceError, RequestError, WeightError
from headrace.base.sampling import SamplingSpec
from headrace.execution import assembly
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor

PROMPT = [5, 9, 130, 7, 44, 12, 80]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {name: write_tiny_checkpoint(home / name, seed) for name, seed in (("first", 1), ("second", 2))}


def build(folder: Path, **options: object) -> LocalExecutor:
    return build_executor(
        engine_config(model=str(folder), device="cpu", dtype="float32", kv_pages=64, page_size=4, **options)
    )


@pytest.fixture
def executor(folders: dict[str, Path]) -> Iterator[LocalExecutor]:
    built = build(folders["first"])
    yield built
    built.close()


def speak(executor: LocalExecutor, count: int = 12) -> list[int]:
    """The greedy continuation of the prompt, on a device that knows nothing of earlier ones."""
    driver = Driver(executor, num_pages=64, page_size=4, num_groups=1)
    driver.start(0, PROMPT, SamplingSpec())
    for _ in range(count):
        driver.step({0: len(PROMPT)})
    driver.release(0)
    executor.execute(driver.plan({})).result()
    return driver.output[0]


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    said = {name: speak(build(folder)) for name, folder in folders.items()}
    assert said["first"] != said["second"]
    return said


def parts_of(executor: LocalExecutor) -> tuple[weakref.ref, weakref.ref]:
    """The pools and the weights, to be watched."""
    runner = executor._runner
    return weakref.ref(runner.pools[0].layer(0)[0]), weakref.ref(runner._model.norm.weight)


@pytest.mark.parametrize("discards", [False, True])
def test_everything_leaves_and_comes_back(executor, expected, discards):
    assert speak(executor) == expected["first"]
    pages, weights = parts_of(executor)
    executor.release_memory(DEVICE_PARTS, discards_weights=discards)
    assert executor.released == set(DEVICE_PARTS) and executor._runner is None
    assert pages() is None, "something still holds pages"
    assert (weights() is None) == discards, "the host keeps weights unless they are discarded"
    executor.acquire_memory(DEVICE_PARTS)
    assert executor.released == set() and speak(executor) == expected["first"]
    executor.release_memory(["kv_cache"])
    executor.release_memory(["kv_cache"])
    executor.acquire_memory(["cuda_graph"])
    assert executor.released == {"kv_cache"} and executor._runner is None
    executor.acquire_memory(["kv_cache"])
    assert speak(executor) == expected["first"]


def test_parts_come_back_one_by_one(executor, expected):
    executor.release_memory(["weights", "kv_cache"], discards_weights=True)
    executor.acquire_memory(["weights"])
    assert executor.released == {"kv_cache"} and executor._runner is None
    executor.acquire_memory(["kv_cache"])
    assert speak(executor) == expected["first"]
    executor.release_memory(["cuda_graph"])
    assert executor._runner is not None and speak(executor) == expected["first"]
    executor.acquire_memory(["cuda_graph"])
    assert executor.released == set() and speak(executor) == expected["first"]


def test_weights_are_replaced(executor, expected, folders):
    _, old = parts_of(executor)
    executor.replace_weights(str(folders["second"]), "auto")
    assert speak(executor) == expected["second"] and executor.config.model.model == str(folders["second"])
    assert old() is None, "the old weights are still in memory"
    executor.release_memory(DEVICE_PARTS, discards_weights=True)
    executor.acquire_memory(DEVICE_PARTS)
    assert speak(executor) == expected["second"], "what is read again is what was loaded last"
    executor.release_memory(["kv_cache"])
    executor.replace_weights(str(folders["first"]), "safetensors")
    executor.acquire_memory(["kv_cache"])
    assert speak(executor) == expected["first"]


def test_a_closed_engine_holds_nothing_for_its_adapters(folders):
    executor = build(folders["first"], enable_lora=True)
    pages, weights = parts_of(executor)
    executor.close()
    assert pages() is None and weights() is None


class Knot:
    """Held by itself alone, when nothing else refers to it."""

    def __init__(self, held: object = None):
        self.held, self.itself = held, self


@pytest.fixture
def frozen() -> Iterator[None]:
    """With a heap that is exempt from collections, as in an engine process; more is frozen by the test itself."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_frozen_cycles_that_hold_a_part_are_freed(executor, frozen):
    pages, weights = parts_of(executor)
    Knot(executor._runner)
    gc.freeze()
    executor.release_memory(DEVICE_PARTS, discards_weights=True)
    assert pages() is None and weights() is None


def test_frozen_objects_are_not_looked_at_where_references_free_all(executor, frozen):
    knot = Knot()
    bystander = weakref.ref(knot)
    pages, weights = parts_of(executor)
    gc.freeze()
    del knot
    executor.close()
    assert pages() is None and weights() is None
    assert bystander() is not None, "the whole heap was collected: this takes seconds in a large process"


def write_broken(folders: dict[str, Path], folder: Path, how: str) -> Path:
    write_tiny_checkpoint(
        folder, 3,
        **({"hidden_size": 16} if how == "smaller" else {"rope_theta": 500.0} if how == "other positions" else {})
    )
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    if how == "one missing":
        del tensors[name]
    elif how == "one too much":
        tensors["model.layers.7.mlp.down_proj.weight"] = tensors[name].clone()
    elif how == "wrong shape":
        tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, path)
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "no configuration":
        (folder / "config.json").unlink()
    elif how == "another family":
        (folder / "config.json").write_text(
            json.dumps(
                {
                    **json.loads((folder / "config.json").read_text()), "architectures": ["Qwen2ForCausalLM"],
                    "model_type": "qwen2"
                }
            )
        )
    return folder


@pytest.mark.parametrize(("how", "kind"), [
    ("smaller", RequestError), ("other positions", RequestError), ("another family", RequestError),
    ("no configuration", HeadraceError),
    ("one missing", WeightError), ("one too much", WeightError), ("wrong shape", WeightError), ("cut off", WeightError),
])
def test_the_old_weights_stay_when_new_ones_do_not_fit(executor, expected, folders, tmp_path, how, kind):
    with pytest.raises(kind):
        executor.replace_weights(str(write_broken(folders, tmp_path / "broken", how)), "auto")
    assert speak(executor) == expected["first"] and executor.config.model.model == str(folders["first"])


def test_no_room_to_come_back(executor, expected, monkeypatch):
    executor.release_memory(DEVICE_PARTS)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patched:
        patched.setattr(assembly.Assembly, "build_runner", refuse)
        with pytest.raises(EngineAsleep, match="no room"):
            executor.acquire_memory(DEVICE_PARTS)
    assert executor.released == {"kv_cache"}
    executor.acquire_memory(DEVICE_PARTS)
    assert speak(executor) == expected["first"]


def test_a_profile_tells_of_operators(executor, tmp_path):
    with pytest.raises(Conflict):
        executor.stop_profile()
    executor.start_profile(StartProfile(str(tmp_path / "new"), has_shapes=True))
    with pytest.raises(Conflict):
        executor.start_profile(StartProfile(str(tmp_path)))
    speak(executor, 2)
    trace = json.loads((tmp_path / "new" / executor.stop_profile()).read_text())
    assert any("mm" in event.get("name", "") or "linear" in event.get("name", "") for event in trace["traceEvents"])
    executor.start_profile(StartProfile(str(tmp_path / "new"), num_steps=1))
    speak(executor, 3)
    assert len(list((tmp_path / "new").iterdir())) == 2, "it ended by itself"
    assert executor.stop_profile() in {path.name for path in (tmp_path / "new").iterdir()}
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="folder"):
        executor.start_profile(StartProfile(str(tmp_path / "file" / "x")))
