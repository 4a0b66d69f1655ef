"""What runs before the first step, and which measure of its memory is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.base.config import engine_config
from headrace.base.sampling import SamplingSpec
from headrace.base.step import StepPlan
from headrace.execution import warmup
from headrace.execution.building import build_executor
from headrace.execution.graph_sizes import GraphSizes, bucket_sizes
from headrace.execution.rows import Rows
from headrace.execution.runner import Runner
from headrace.kernels.launch import next_power_of_2

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


MAX_TOKENS, MAX_ROWS = 8192, 256


def mixed_shapes(monkeypatch: pytest.MonkeyPatch, **options: object) -> list[StepPlan]:
    """The plans of `run_mixed_steps`."""
    plans: list[StepPlan] = []
    pending = SimpleNamespace(result=lambda: None)
    layout = SimpleNamespace(max_rows=MAX_ROWS, max_model_len=32_768)
    runner = SimpleNamespace(layout=layout, execute=lambda plan: plans.append(plan) or pending)
    warmup.run_mixed_steps(runner, MAX_TOKENS, **options)
    return [plan for plan in plans if plan.rows]


@pytest.mark.parametrize("group, head_dim", [(4, 128), (8, 256), (1, 64)])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 32, 40])
def test_decodes_beside_chunks_find_their_kernels(
    kv_heads: int, group: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
):
    """A chunk that takes no graph comes beside any number of decodes, of any length."""
    pytest.importorskip("triton")
    from headrace.kernels.attention import decodes

    tile = decodes.decode_tile(group, head_dim, 2)

    def variant(count: int, longest: int) -> tuple[object, ...]:  # as `decodes.decode` has it
        slots, own = decodes.plan_splits(count, kv_heads, longest, head_dim=head_dim, tile=tile, processors=132)
        block = 1 if count == 1 or slots == count else max(16, next_power_of_2(count))
        return slots > count, block, own

    lengths = sorted({*range(1, 200), *range(200, 32_768, 331), 4096, 4097, 32_768})
    wanted = {variant(count, longest) for count in range(1, MAX_ROWS) for longest in lengths}
    plans = mixed_shapes(monkeypatch)
    assert {variant(p.num_decodes, p.begins[0] + 1) for p in plans if p.num_decodes} == wanted


@pytest.mark.parametrize("outputs, inputs", [(1280, 1280), (5120, 1280), (1280, 5120), (12288, 4096), (4096, 12288)])
def test_steps_of_any_size_find_their_products(outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch):
    """Between the least and the largest that is captured, as steps of prompts are without graphs, or before theirs."""
    pytest.importorskip("triton")
    from headrace.kernels.linear import hopper
    from headrace.kernels.linear.triton import gemv_rows

    def variants(rows: int) -> tuple[object, ...]:
        size = outputs * inputs
        return (
            hopper.choose_tile(rows, outputs, inputs), hopper.choose_sums_tile(rows, outputs, inputs),
            hopper.choose_gated_tile(rows, size), rows > gemv_rows(size),
        )

    warm = {sum(plan.lengths) for plan in mixed_shapes(monkeypatch)}
    for index in range(4):
        found = {variants(rows)[index] for rows in warm}
        assert {variants(rows)[index] for rows in range(2, MAX_TOKENS + 1)} == found
    assert {sum(plan.lengths) for plan in mixed_shapes(monkeypatch, is_pooling=True)} >= {129, 4096, MAX_TOKENS}


def test_mixed_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the rows and tokens that there are; they leave no row behind."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(warmup, "precompile", lambda run, about, device: run())
    execute, plans = Runner.execute, []

    def note(runner: Runner, plan: StepPlan):
        plans.append(plan)
        return execute(runner, plan)

    monkeypatch.setattr(Runner, "execute", note)
    executor = build_executor(engine_config(
        model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16, max_running_requests=20,
        max_step_tokens=100,
    ))
    executor.close()
    mixed = [plan for plan in plans if 0 < plan.num_decodes < len(plan.rows)]
    assert {plan.num_decodes for plan in mixed} == {1, 2, 3, 4, 5, 8, 9, 16, 17, 19}
    assert all(sum(plan.lengths) <= 100 and len(plan.rows) <= 20 for plan in plans)
    assert {sum(plan.lengths) for plan in plans} >= {2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100}
    started, released = [s.row for p in plans for s in p.starts], [row for p in plans for row in p.releases]
    assert sorted(started) == sorted(released)


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


LATE = """
import json, sys
from headrace.base.config import engine_config
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.build import build_engine

engine = build_engine(engine_config(
    model=sys.argv[1], load_format="dummy", device="cuda", dtype="bfloat16", skip_tokenizer=True,
    max_model_len=4096, max_running_requests=64, max_step_tokens=4096, kv_pages=2048, **json.loads(sys.argv[2]),
))
for number in range(48):  # each prompt is too long for a graph, and comes beside one more decode
    engine.submit(EngineRequest(str(number), [number] * (1030 + number), SamplingSpec(), StopSpec(100)))
    engine.step()
for length in range(1, 400, 7):
    engine.submit(EngineRequest(f"short {length}", [1] * length, SamplingSpec(), StopSpec(1)))
    engine.step()
while engine.has_work:
    for output in engine.step():
        assert output.finish is None or output.finish.error is None, output.finish
print("late", engine.executor.late_kernels)
engine.close()
"""


LLAMA = {
    **CONFIG, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 8192, "vocab_size": 4096,
}
FLASH = Path(__file__).parents[2] / "benchmarks" / "models" / "deepseek-v4-flash" / "config.json"
DEEPSEEK_V4 = {
    **json.loads(FLASH.read_text()), "vocab_size": 4096, "hidden_size": 1024, "q_lora_rank": 256, "o_lora_rank": 128,
    "index_topk": 64, "n_routed_experts": 16, "moe_intermediate_size": 256, "num_hidden_layers": 5,
    "max_position_embeddings": 8192,
}


@pytest.mark.cuda
@pytest.mark.parametrize(("config", "options"), [
    (LLAMA, {"graphs": "lazy"}), (DEEPSEEK_V4, {"graphs": "off", "kv_dtype": "fp8"}),
    (DEEPSEEK_V4, {"graphs": "lazy", "kv_dtype": "fp8", "hot_slots": 256, "page_size": 128, "prefix_cache": False}),
], ids=["llama", "deepseek-v4", "hot-slots"])
def test_no_step_waits_for_a_kernel(config: dict[str, Any], options: dict[str, Any], tmp_path: Path):
    """Without graphs, or with those that are recorded while requests wait; in a process whose kernels nobody has
    compiled."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    found = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path), json.dumps(options)], capture_output=True, text=True,
        env=environment, timeout=300
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split()[-2:] == ["late", "0"], found.stderr[-4000:]
