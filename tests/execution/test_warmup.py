"""What runs before the first step, and which measure of its memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.base.config import engine_config
from headrace.base.sampling import SamplingSpec
from headrace.execution import warmup
from headrace.execution.building import build_executor
from headrace.execution.graph_sizes import GraphSizes, bucket_sizes
from headrace.execution.rows import Rows
from headrace.execution.runner import Runner

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
}


def test_few_sizes_stand_for_all():
    thin = warmup._thin(GraphSizes(bucket_sizes(512), [64, 128, 8192]))
    assert thin == GraphSizes([1, 2, 4, 8, 16, 17, 24, 32, 33, 64, 65, 128, 129, 256, 257, 512], [64, 8192])
    assert (
        warmup._thin(GraphSizes(bucket_sizes(300), []))
        == GraphSizes([1, 2, 4, 8, 16, 17, 24, 32, 33, 64, 65, 128, 129, 256, 257, 300], [])
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_the_largest_step_runs_once(is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked: list[str] = []
    measured = iter([warmup.StepBytes(111), warmup.StepBytes(222)])
    steps: list[int] = []

    def pretend(run: Callable[[], None], about: str, device: torch.device) -> int:
        asked.append(about)
        if not is_known:
            run()
        return 0

    monkeypatch.setattr(warmup, "precompile", pretend)
    monkeypatch.setattr(warmup, "measure_steps", lambda *about: steps.append(1) or next(measured))
    executor = build_executor(engine_config(model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16))
    lines = {line.name: line.num_bytes for line in executor.memory}
    assert lines["activations"] == 111 and len(steps) == 1
    assert len(asked) == 1 and '"hidden_size":32' in asked[0]
    executor.close()


def test_a_start_with_adapters_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its kernels are others than those of a start without, which was compiled for."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked: set[str] = set()
    monkeypatch.setattr(warmup, "precompile", lambda run, about, device: asked.add(about))
    for options in ({}, {"enable_lora": True}, {"enable_lora": True, "max_lora_rank": 64}):
        build_executor(engine_config(
            model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16, **options
        )).close()
    assert len(asked) == 3


def test_steps_with_adapters_are_compiled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As they are launched outside of graphs, too: of the first slots, and of others where there are more."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run_tiny_steps, slots = warmup.run_tiny_steps, []

    def run(runner: Runner, *, adapter_slot: int = -1, **options: object) -> None:
        slots.append(adapter_slot)
        run_tiny_steps(runner, adapter_slot=adapter_slot, **options)
        assert int(runner._rows.adapter_slots_np[0]) == adapter_slot

    monkeypatch.setattr(warmup, "run_tiny_steps", run)
    monkeypatch.setattr(warmup, "precompile", lambda run, about, device: run())
    for max_loras, expected in ((0, {-1}), (2, {-1, 0}), (64, {-1, 0, 63})):
        slots.clear()
        options = {"enable_lora": True, "max_loras": max_loras} if max_loras else {}
        build_executor(engine_config(
            model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16, **options
        )).close()
        assert set(slots) == expected


def test_warmup_leaves_the_model_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The runner that comes next binds its own."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(warmup, "precompile", lambda run, about, device: run())
    ran: list[SamplingSpec] = []
    real = warmup.run_tiny_steps
    monkeypatch.setattr(
        warmup, "run_tiny_steps", lambda *args, **options: ran.append(options["sampling"]) or real(*args, **options)
    )
    placed: list[int] = []
    monkeypatch.setattr(Rows, "place_drafts", lambda self, guesses, count: placed.append(count))
    executor = build_executor(engine_config(model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16))
    assert ran == [SamplingSpec(), *warmup.SAMPLED_WAYS]
    assert placed, "a drafted step comes while a request waits"
    executor.close()


def test_what_captured_steps_read_is_measured(monkeypatch: pytest.MonkeyPatch):
    """Vectors of media, tables and inputs are allocated when steps are captured, before any is recorded."""
    happened: list[str] = []

    def measure(run: Callable[[], object], device: torch.device) -> int:
        happened.append("begin")
        run()
        happened.append("end")
        return 7

    captured = SimpleNamespace(record_largest=lambda: happened.append("record"))
    runner = SimpleNamespace(capture=lambda sizes, recorder: happened.append("allocate") or captured)
    monkeypatch.setattr(warmup, "measure_peak", measure)
    assert warmup._measure_captured(runner, GraphSizes([1], []), CPU) == 7
    assert happened == ["begin", "allocate", "record", "end"]
