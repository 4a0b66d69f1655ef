"""Memory while models are loaded: at most one weight is plain and in codes, and a failed start keeps nothing."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import CONFIG, write_tiny_checkpoint
from torch.profiler import ProfilerActivity, profile

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError
from headrace.execution import building
from headrace.execution.building import build_executor
from headrace.kernels.coded_linear.quantise import quantise_integer
from headrace.layers.build import Build, deferred_matrices
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.model import ServedModel
from headrace.layers.quantization.blocks import CodedTensor
from headrace.layers.quantization.coded import Form, Storing
from headrace.layers.quantization.storage import count_bytes
from headrace.models.catalog import find_family
from headrace.models.weights.dummy import fill_dummy_weights

WIDE = {**CONFIG, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
LARGEST = 2 * 1024 * 256 * 4
"""Bytes of the largest matrix, gate and up, in float32."""
FORM = Form(lambda weight: quantise_integer(weight, 4, 128))


def build_wide() -> ServedModel:
    family = find_family("LlamaForCausalLM")
    with deferred_matrices():
        return family.build_model(family.read_config(WIDE), Build(torch.device("cpu"), torch.float32))


def fill_at_random() -> ServedModel:
    model = build_wide()
    storing = Storing(model, FORM)
    fill_dummy_weights(model, 0, store=storing.store)
    assert storing.finish() == (16 * 4, 0), "q, k and v, output, gate and up, down of each layer are stored"
    return model


def load_codes() -> ServedModel:
    model: Any = build_wide()
    names = {theirs: ours for theirs, ours in model.names.modules.items() if ours != "head"}
    targets = find_targets(model, names)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in [(name, target.shape) for name, target in targets.items()]:
            is_coded = len(shape) == 2 and "embed" not in name
            yield name, CodedTensor(FORM.quantise(torch.randn(shape))) if is_coded else torch.randn(shape)

    fill_targets(targets, read())
    return model


def measure_peak(run: Callable[[], Any], folder: Path) -> tuple[Any, int]:
    """What ``run`` returns, and the most bytes that it has at a time on the host."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    at, peak = 0, 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        at += event["args"]["Bytes"]
        peak = max(peak, at)
    return made, peak


@pytest.mark.parametrize("load", [fill_at_random, load_codes])
def test_one_weight_at_a_time_is_plain(load: Callable[[], ServedModel], tmp_path: Path) -> None:
    model, peak = measure_peak(load, tmp_path)
    kept, plain = count_bytes(model), 16 * 3 * 1024 * 256 * 4
    assert kept < plain / 4
    # besides what is kept: the largest weight, and what quantising it takes
    assert peak < kept + 8 * LARGEST < plain


def test_what_is_not_stored_has_memory() -> None:
    model = build_wide()
    fill_dummy_weights(model, 0)
    plain = find_family("LlamaForCausalLM").build_model(model.spec, Build(torch.device("cpu"), torch.float32))
    fill_dummy_weights(plain, 0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_failed_start_gives_the_model_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Any]] = []
    load = building.load_with_draft

    def load_and_note(*args: Any) -> Any:
        made = load(*args)
        loaded.append(weakref.ref(made.model))
        return made

    monkeypatch.setattr(building, "load_with_draft", load_and_note)
    config = engine_config(
        model=str(write_tiny_checkpoint(tmp_path, 1)), device="cpu", kv_pages=4, page_size=16, max_model_len=512
    )
    with pytest.raises(ConfigError, match="does not fit the KV cache") as caught:
        build_executor(config)
    assert caught.value.param == "max_model_len"
    assert loaded[0]() is None, "the error keeps the model's weights alive"
