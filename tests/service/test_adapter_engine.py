"""An engine with LoRA adapters against engines over merged weights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from adapter_rig import VOCAB, Answer, Rig, ask, check_answer, drain, make_config, take, write_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.base.adapters import AdapterConfig, LoadAdapter, PinAdapter, UnloadAdapter
from headrace.base.admin import DEVICE_PARTS
from headrace.base.config import CacheConfig, ModelConfig
from headrace.base.errors import AdapterError, Conflict, ModelError, NotFound
from headrace.base.messages import Call, EngineRequest
from headrace.execution import adapters
from headrace.layers.lora.extras import MEASURED, MEASURED_COPIES
from headrace.layers.lora.staging import StagedFactors
from headrace.memory.pinning import PinnedReserve
from headrace.service.build import build_engine
from headrace.service.control import Control
from headrace.service.engine import Engine


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("adapters"))
    yield made
    made.close()


def prompt(seed: int, length: int = 11) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def test_more_adapters_than_slots_each_say_their_own(rig: Rig):
    requests = [
        ask(f"r{i}", prompt(i, 5 + 7 * (i % 4)), ("a0", "a1", "a2", "")[i % 4]) for i in range(12)
    ]
    for request in requests:
        rig.engine.submit(request)
    answers = drain(rig.engine)
    for request in requests:
        check_answer(answers[request.request_id], rig.expect(request.adapter, request))
    stats = rig.engine.stats().adapters
    assert (stats.num_loaded, stats.num_resident) == (3, 2)
    assert stats.loads_total >= 3 and not stats.running and not stats.waiting


def test_prefixes_are_not_shared_between_adapters(rig: Rig):
    """The same prompt again and again: whoever takes another adapter's pages says something else."""
    for adapter in ("a0", "", "a1", "a0", "a2", ""):
        request = ask("again", prompt(50, 17), adapter)
        rig.engine.submit(request)
        check_answer(drain(rig.engine)["again"], rig.expect(adapter, request))
    rig.engine.submit(ask("again", prompt(50, 17), "a2"))
    assert drain(rig.engine)["again"].outputs[-1].num_cached_tokens == 16


def test_an_unknown_adapter_fails_alone(rig: Rig):
    rig.engine.submit(ask("bad", prompt(1), "nobody"))
    rig.engine.submit(ask("good", prompt(1), "a1"))
    answers = drain(rig.engine)
    assert answers["bad"].error == "not_found" and len(answers["good"].token_ids) == 8


def test_base_requests_pass_one_that_waits_for_a_slot(rig: Rig):
    engine, answers = rig.engine, dict[str, Answer]()
    for i, adapter in enumerate(("a0", "a1")):
        engine.submit(ask(f"long{i}", prompt(i), adapter, max_tokens=60))
    for _ in range(3):
        take(engine.step(), answers)
    engine.submit(ask("waits", prompt(7), "a2"))
    engine.submit(ask("passes", prompt(8)))
    while "passes" not in answers or answers["passes"].outputs[-1].finish is None:
        take(engine.step(), answers)
        engine.check()
    assert "waits" not in answers and engine.stats().adapters.waiting == {"a2": 1}
    drain(engine, answers)
    check_answer(answers["waits"], rig.expect("a2", ask("waits", prompt(7))))


def test_unloading_drains(rig: Rig):
    engine, path = rig.engine, write_adapter(rig.base, rig.folder / "gone", 9)
    engine.adapters.load(LoadAdapter("gone", str(path)))
    engine.submit(ask("last", prompt(3), "gone", max_tokens=20))
    answers: dict[str, Answer] = {}
    take(engine.step(), answers)
    told = engine.adapters.unload(UnloadAdapter("gone"))
    assert told.is_draining and told.num_requests == 1
    engine.submit(ask("late", prompt(3), "gone"))
    drain(engine, answers)
    assert answers["late"].error == "not_found"
    check_answer(answers["last"], rig.expect("gone", ask("last", prompt(3), max_tokens=20)))
    assert "gone" not in [info.name for info in engine.adapters.describe_all()]
    with pytest.raises(NotFound, match="gone"):
        engine.adapters.unload(UnloadAdapter("gone"))


def test_a_reload_in_place_leaves_running_requests_alone(rig: Rig):
    engine, answers = rig.engine, dict[str, Answer]()
    first, second = (write_adapter(rig.base, rig.folder / name, seed) for name, seed in (("v1", 21), ("v2", 22)))
    engine.adapters.load(LoadAdapter("live", str(first)))
    with pytest.raises(Conflict, match="live"):
        engine.adapters.load(LoadAdapter("live", str(second)))
    engine.submit(ask("old", prompt(4), "live", max_tokens=16))
    take(engine.step(), answers)
    engine.adapters.load(LoadAdapter("live", str(second), replaces=True))
    engine.submit(ask("new", prompt(4), "live", max_tokens=16))
    drain(engine, answers)
    check_answer(answers["old"], rig.expect("v1", ask("old", prompt(4), max_tokens=16)))
    check_answer(answers["new"], rig.expect("v2", ask("new", prompt(4), max_tokens=16)))
    engine.adapters.unload(UnloadAdapter("live"))


def test_pins_keep_an_adapter_on_the_device(rig: Rig):
    engine = rig.engine
    engine.adapters.pin(PinAdapter("a0"))
    with pytest.raises(Conflict, match="max_loras"):
        engine.adapters.pin(PinAdapter("a1"))
    for adapter in ("a0", "a1", "a2", "a1", "a2"):
        engine.submit(ask("one", prompt(2), adapter, max_tokens=2))
        drain(engine)
    resident = {info.name for info in engine.adapters.describe_all() if info.is_resident}
    assert resident == {"a0", "a2"}
    engine.adapters.pin(PinAdapter("a0", False))


def test_aborted_requests_free_their_adapter(rig: Rig):
    engine = rig.engine
    for i, adapter in enumerate(("a0", "a1", "a2", "a2")):
        engine.submit(ask(f"r{i}", prompt(i), adapter, max_tokens=50))
    engine.step()
    for i in range(4):
        engine.abort(f"r{i}")
    drain(engine)
    assert all(info.num_requests == 0 for info in engine.adapters.describe_all())


EXTRA = ("x0", "x1", "x2")
NAMES = st.sampled_from(EXTRA)
ACTIONS = st.one_of(
    st.tuples(st.just("load"), NAMES), st.tuples(st.just("unload"), NAMES), st.tuples(st.just("step"), st.just("")),
    st.tuples(st.just("abort"), st.integers(0, 99)),
    *(st.tuples(st.just("ask"), st.tuples(
        st.sampled_from(["", "a0", "a1", "a2", *EXTRA]), st.integers(0, 3), st.integers(1, 29), st.integers(1, 8)
    )) for _ in range(3)),
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(actions=st.lists(ACTIONS, min_size=20, max_size=50))
def test_random_traffic_loads_and_unloads(rig: Rig, actions: list[tuple[str, Any]]):
    """Each request says what it says alone, whatever is loaded, reloaded and unloaded around it."""
    engine, answers, expected = rig.engine, dict[str, Answer](), dict[str, EngineRequest]()
    loaded: set[str] = set()
    for number, (action, what) in enumerate(actions):
        if action == "load":
            path = write_adapter(rig.base, rig.folder / what, 30 + int(what[1:]), rank=2 + int(what[1:]))
            engine.adapters.load(LoadAdapter(what, str(path), replaces=what in loaded))
            loaded.add(what)
        elif action == "unload" and what in loaded:
            engine.adapters.unload(UnloadAdapter(what))
            loaded.discard(what)
        elif action == "abort" and expected:
            engine.abort(sorted(expected)[what % len(expected)])
        elif action == "ask" and (what[0] in loaded or what[0] not in EXTRA):
            adapter, seed, length, max_tokens = what
            request = expected[f"r{number}"] = ask(f"r{number}", prompt(seed, length), adapter, max_tokens=max_tokens)
            engine.submit(request)
        take(engine.step(), answers)
        engine.check()
    drain(engine, answers)
    for request_id, request in expected.items():
        found, whole = answers[request_id], rig.expect(request.adapter, request)
        if found.outputs[-1].finish is not None and found.outputs[-1].finish.reason == "abort":
            assert found.token_ids == whole.token_ids[: len(found.token_ids)]
        else:
            check_answer(found, whole)
    for name in loaded:
        engine.adapters.unload(UnloadAdapter(name))


def open_engine(rig: Rig, **changes: Any) -> Engine:
    """Another engine with the rig's adapters; ``changes``: other sections of its configuration."""
    modules = " ".join(f"a{i}={path}" for i, path in enumerate(rig.paths))
    config = make_config(rig.base, adapters=AdapterConfig(enable_lora=True, max_loras=2, lora_modules=modules))
    return build_engine(replace(config, **changes))


def ask_all(rig: Rig, engine: Engine, *, is_exact: bool = True) -> dict[str, Answer]:
    """One request for each adapter and the base, together; compared with merged weights unless told otherwise."""
    requests = [ask(f"r{i}", prompt(i, 9 + 6 * i), name, max_tokens=5) for i, name in enumerate(("a0", "a1", "a2", ""))]
    for request in requests:
        engine.submit(request)
    answers = drain(engine)
    for request in requests:
        if is_exact:
            check_answer(answers[request.request_id], rig.expect(request.adapter, request))
    return answers


def test_adapters_are_there_again_after_sleep(rig: Rig):
    engine = open_engine(rig)
    control, parts = Control(engine, lambda: None), list(DEVICE_PARTS)
    ask_all(rig, engine)
    assert control.answer(Call(1, "release_memory", {"parts": parts})).result == sorted(parts)
    assert control.answer(Call(2, "acquire_memory", {"parts": parts})).result == []
    ask_all(rig, engine)
    engine.close()


def test_prefixes_of_adapters_come_back_from_host_memory(rig: Rig):
    """With so few pages that each request evicts what the others cached."""
    cache = CacheConfig(page_size=4, kv_pages=13, host_cache_gb=0.02)
    engine = open_engine(rig, cache=cache)
    for _ in range(3):
        ask_all(rig, engine)
    assert engine.stats().tiers.host.read_pages_total
    engine.close()


def test_adapters_on_quantised_weights(rig: Rig):
    """Near to what merged weights say, and further from the base model."""
    model = ModelConfig(model=str(rig.base), quantization="int8", skip_tokenizer=True)
    engine = open_engine(rig, model=model)
    answers = ask_all(rig, engine, is_exact=False)
    for i, name in enumerate(("a0", "a1", "a2")):
        request = ask(f"r{i}", prompt(i, 9 + 6 * i), name, max_tokens=1)
        own, base = rig.expect(name, request).logprobs[0], rig.expect("", request).logprobs[0]
        assert abs(answers[f"r{i}"].logprobs[0] - own) < 0.25 * max(abs(own - base), 0.2), name
    engine.close()


def test_cycles_of_loads_and_unloads_leave_nothing(rig: Rig):
    """Thousands: benchmarks/adapter_cycles.py."""
    engine, path = rig.engine, write_adapter(rig.base, rig.folder / "cycled", 40)
    store = engine.executor.adapters
    before = set(store._sources), set(store._prepared), engine.stats().adapters.num_loaded
    for cycle in range(25):
        engine.adapters.load(LoadAdapter(f"c{cycle}", str(path)))
        engine.submit(ask(f"c{cycle}", prompt(cycle, 3), f"c{cycle}", max_tokens=2))
        engine.step()
        engine.adapters.unload(UnloadAdapter(f"c{cycle}"))
        drain(engine)
    assert (set(store._sources), set(store._prepared), engine.stats().adapters.num_loaded) == before


def make_engine_of_one(rig: Rig, *names: str) -> Engine:
    """An engine with room for one adapter on the device and in host memory."""
    engine = build_engine(make_config(rig.base, adapters=AdapterConfig(enable_lora=True, max_loras=1)))
    for number, name in enumerate(names):
        engine.adapters.load(LoadAdapter(name, str(write_adapter(rig.base, rig.folder / name, 60 + number))))
    store = engine.executor.adapters
    while len(store._prepared) > 1:  # as with max_cpu_loras=1
        store._prepared.popitem(last=False)
    return engine


def test_adapters_are_read_and_loaded_as_on_a_gpu(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Into pieces that are there before, and through memory of the device; read again when host memory was too small,
    and in slots that others had."""
    engine = build_engine(make_config(rig.base, adapters=AdapterConfig(enable_lora=True, max_loras=2, max_cpu_loras=2)))
    store = engine.executor.adapters
    store._own_banks.stage_loads()
    reserve = store._reserve = PinnedReserve(3, lambda num_bytes: torch.full((num_bytes,), 255, dtype=torch.uint8))
    loads = []
    load = StagedFactors.load
    monkeypatch.setattr(StagedFactors, "load", lambda self, *args: (loads.append(len(self.modules)), load(self, *args)))
    for number in range(3):
        path = write_adapter(rig.base, rig.folder / f"staged{number}", 80 + number)
        engine.adapters.load(LoadAdapter(f"staged{number}", str(path)))
    requests = [ask(f"r{i}", prompt(i), ("staged0", "staged1", "staged2", "")[i % 4]) for i in range(12)]
    for request in requests:
        engine.submit(request)
    answers = drain(engine)
    for request in requests:
        check_answer(answers[request.request_id], rig.expect(request.adapter, request))
    assert len(loads) >= 3 and min(loads) > 0
    engine.close()
    assert not reserve.num_ready


def test_what_was_prepared_for_a_request_is_not_read_when_a_step_begins(rig: Rig):
    """Though others took its place in host memory meanwhile."""
    engine = make_engine_of_one(rig, "dropped", "latest")
    store, number = engine.executor.adapters, engine.adapters._by_name["dropped"].number
    store.prepare(number).result()
    store._prepared.clear()
    (rig.folder / "dropped" / "adapter_config.json").unlink()
    store.load(0, number)
    assert not store._wanted, "what is on the device need not stay in host memory"
    engine.close()


def write_whole(rig: Rig) -> tuple[Path, int]:
    """An adapter that replaces the embedding, which is the head; and the bytes of its matrix."""
    folder = write_adapter(rig.base, rig.folder / "whole", 70)
    matrix = load_file(rig.base / "model.safetensors")["model.embed_tokens.weight"]
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.embed_tokens.weight"] = matrix.clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["embed_tokens"]}))
    return folder, matrix.nbytes


def test_whole_modules_that_do_not_fit_on_the_device(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """They are refused when they are loaded, with what they take; additions have room of their own."""
    folder, num_bytes = write_whole(rig)
    monkeypatch.setattr(adapters, "free_bytes", lambda _: num_bytes - 1)
    with pytest.raises(AdapterError, match="whole modules and embeddings take"):
        rig.engine.adapters.load(LoadAdapter("whole", str(folder)))
    monkeypatch.setattr(adapters, "free_bytes", lambda _: 2 * num_bytes)  # the head is the embedding
    rig.engine.adapters.load(LoadAdapter("whole", str(folder)))
    rig.engine.adapters.unload(UnloadAdapter("whole"))


def test_whole_modules_of_several_adapters_are_counted_together(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Of as many as may be on the device at a time; what one has already there counts as free."""
    folder, num_bytes = write_whole(rig)
    monkeypatch.setattr(adapters, "free_bytes", lambda _: num_bytes)
    rig.engine.adapters.load(LoadAdapter("first", str(folder)))
    with pytest.raises(AdapterError, match=r"with other adapters .* MiB"):
        rig.engine.adapters.load(LoadAdapter("second", str(folder)))
    rig.engine.submit(ask("r", prompt(1), "first", max_tokens=1))
    drain(rig.engine)
    for name in ("second", "third"):  # of three, two are there at a time
        rig.engine.adapters.load(LoadAdapter(name, str(folder)))
    for name in ("first", "second", "third"):
        rig.engine.adapters.unload(UnloadAdapter(name))
    rig.engine.adapters.load(LoadAdapter("first", str(folder)))
    rig.engine.adapters.unload(UnloadAdapter("first"))


def test_whole_modules_of_the_first_adapters_are_planned(rig: Rig):
    """Pages get what they leave."""
    folder, num_bytes = write_whole(rig)
    config = make_config(rig.base, adapters=AdapterConfig(
        enable_lora=True, max_loras=2, lora_modules=f"whole={folder} plain={rig.paths[0]}"
    ))
    engine = build_engine(config)
    lines = {line.name: line.num_bytes for line in engine.executor.memory}
    assert lines["whole modules of adapters"] == 2 * num_bytes
    engine.close()


def test_weights_whose_norms_an_adapter_needs_must_fit(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Of DoRA, while it is loaded."""
    folder = write_adapter(rig.base, rig.folder / "dora", 71, targets=("q_proj",))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in list(tensors.items()):
        if "lora_B" in name:
            tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(len(tensor))
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    monkeypatch.setattr(adapters, "free_bytes", lambda _: MEASURED)
    with pytest.raises(AdapterError, match=f"and {MEASURED * MEASURED_COPIES >> 20} MiB while it is loaded"):
        rig.engine.adapters.load(LoadAdapter("dora", str(folder)))


def test_what_a_rank_has_read_must_be_what_the_first_has(rig: Rig):
    engine = make_engine_of_one(rig, "alike", "kept")
    store, adapter = engine.executor.adapters, engine.adapters._by_name["alike"]
    store.prepare(adapter.number, adapter.facts.digest)
    store.load(0, adapter.number)
    store.prepare(adapter.number, "f" * 64)
    with pytest.raises(ModelError, match="alike changed while the ranks read them"):
        store.load(0, adapter.number)
    engine.close()


def test_files_that_have_gone_fail_their_requests_alone(rig: Rig):
    engine = make_engine_of_one(rig, "vanished", "kept")
    (rig.folder / "vanished" / "adapter_config.json").unlink()
    for number in range(3):  # the second finds what the first has left
        engine.submit(ask(f"lost{number}", prompt(1), "vanished"))
        engine.submit(ask(f"base{number}", prompt(2), max_tokens=3))
        answers = drain(engine)
        assert answers[f"lost{number}"].error, number
        assert "step" not in answers[f"lost{number}"].error
        assert len(answers[f"base{number}"].token_ids) == 3
    engine.close()


def test_files_that_go_while_a_request_waits_for_a_slot(rig: Rig):
    """Its adapter had one when it came, so that it was not held."""
    engine = make_engine_of_one(rig, "gone", "stays")
    engine.submit(ask("before", prompt(1), "gone"))
    assert drain(engine)["before"].token_ids
    (rig.folder / "gone" / "adapter_config.json").unlink()
    engine.executor.adapters.prepare(engine.adapters._by_name["stays"].number).result()
    del engine.executor.adapters._prepared[engine.adapters._by_name["gone"].number]  # as with max_cpu_loras=1
    for number in range(2):
        engine.submit(ask("base", prompt(2), max_tokens=30))
        engine.submit(ask("taker", prompt(3), "stays", max_tokens=3))
        engine.submit(ask("lost", prompt(4), "gone"))
        answers = drain(engine)
        assert len(answers["base"].token_ids) == 30 and len(answers["taker"].token_ids) == 3, number
        finish = answers["lost"].outputs[-1].finish
        assert finish is not None and finish.error is not None and finish.error.param == "model"
        assert "load it again" in finish.error.message and str(rig.folder) not in finish.error.message
        engine.check()
    engine.close()


def test_an_adapter_that_cannot_be_loaded_fails_no_later_step(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Such as one for whose whole modules the device has no memory."""
    engine = make_engine_of_one(rig, "large")
    number, load = engine.adapters._by_name["large"].number, engine.executor.adapters.load

    def load_others(slot: int, adapter_id: int) -> None:
        if adapter_id == number:
            raise RuntimeError("no memory")
        load(slot, adapter_id)

    monkeypatch.setattr(engine.executor.adapters, "load", load_others)
    engine.submit(ask("large", prompt(1), "large"))
    assert drain(engine)["large"].error == "step_failed"
    engine.submit(ask("base", prompt(2), max_tokens=3))
    assert len(drain(engine)["base"].token_ids) == 3
    engine.close()


def test_an_adapter_is_loaded_behind_the_launch_of_a_step_of_others(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Not before it, where the device would wait for the host."""
    engine = make_engine_of_one(rig, "late")
    runner, store, order = engine.executor._runner, engine.executor.adapters, []
    choose, beside, load = runner._choose_path, store.load_beside, store.load

    def note(what: str, call: Any) -> Any:
        return lambda *args: (order.append(what), call(*args))[1]

    monkeypatch.setattr(runner, "_choose_path", note("launch", choose))
    monkeypatch.setattr(store, "load_beside", note("beside", beside))
    monkeypatch.setattr(store, "load", note("load", load))
    engine.submit(ask("base", prompt(1), max_tokens=12))
    answers: dict[str, Answer] = {}
    take(engine.step(), answers)
    engine.submit(ask("own", prompt(2), "late", max_tokens=2))
    drain(engine, answers)
    assert len(answers["own"].token_ids) == 2
    assert "load" not in order and order[order.index("beside") - 1] == "launch"
    engine.close()


def test_steps_wait_for_what_a_failed_load_copied(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """The slot is emptied next: nothing may still be written to it by another stream."""
    engine = make_engine_of_one(rig, "half")
    store, number = engine.executor.adapters, engine.adapters._by_name["half"].number
    waits: list[Any] = []
    stream = SimpleNamespace(wait_event=waits.append, record_event=lambda: "copied", device=None)
    monkeypatch.setattr(store, "_side", stream)
    monkeypatch.setattr(store, "_begun", SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def fail(slot: int, adapter: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(store._own_banks, "load", fail)
        with pytest.raises(RuntimeError):
            store.load_beside(0, number)
    waits.clear()
    store.begin_step(has_loads=False)
    assert waits == ["copied"]
    store.load_beside(0, number)
    waits.clear()
    engine.executor._runner.detach()
    assert waits == ["copied"], "the memory of banks may be freed next"
    engine.close()


def test_a_salt_is_not_the_namespace_of_an_adapter(rig: Rig):
    """Whoever knows an adapter's content must not be able to put pages of the base model in its place."""
    engine, digest = rig.engine, rig.engine.adapters._by_name["a1"].facts.digest
    for salt in (f"{digest}/", f"{digest}"):
        engine.submit(msgspec.structs.replace(ask("base", prompt(70, 17)), namespace=salt))
    drain(engine)
    request = ask("own", prompt(70, 17), "a1")
    engine.submit(request)
    found = drain(engine)["own"]
    assert not found.outputs[-1].num_cached_tokens
    check_answer(found, rig.expect("a1", request))


def test_the_only_slot_cannot_be_pinned(rig: Rig):
    engine = make_engine_of_one(rig, "first", "second")
    with pytest.raises(Conflict, match="max_loras"):
        engine.adapters.pin(PinAdapter("first"))
    for name in ("first", "second"):
        engine.submit(ask(name, prompt(1), name, max_tokens=2))
    answers = drain(engine)
    assert len(answers["first"].token_ids) == len(answers["second"].token_ids) == 2
    engine.close()
