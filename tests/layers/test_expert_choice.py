"""Experts in codes as layers keep them: measured, kept or dequantised again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.kernels.coded_linear.device_codes import pack_for_device
from headrace.kernels.coded_linear.forms import STACK_PLAN, CodedWeight
from headrace.kernels.coded_linear.quantise import quantise_fp4
from headrace.kernels.cuda_source import CudaSourceError
from headrace.kernels.moe import CODED_EXPERTS
from headrace.layers.build import Build
from headrace.layers.moe.choice import TOKENS, keep_faster_experts
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.quantization.storage import plain_weight
from headrace.layers.spec import MlpSpec, MoeSpec, RoutingSpec


def build_coded() -> MoeMlp:
    """A layer whose experts are in MXFP4."""
    build = Build(torch.device("cpu"), torch.float32, moe_experts="reference")
    layer = MoeMlp(MoeSpec(RoutingSpec(4, top_k=2), MlpSpec(96)), 64, build)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for stack in (layer.experts.gate_up, layer.experts.down):
        codes = pack_for_device(quantise_fp4(stack.weight.flatten(0, 1)))
        assert codes is not None
        stack.stored = CodedWeight(codes, STACK_PLAN)
        del stack.weight
    return layer


@pytest.mark.parametrize("is_faster", [True, False])
def test_experts_stay_in_codes_where_that_is_faster(
    is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    calls: list[bool] = []

    def time(call: Any) -> float:
        calls.append(call.func is CODED_EXPERTS.load("reference"))
        return 1.0 if calls[-1] == is_faster else 3.0

    model = torch.nn.Sequential(build_coded(), build_coded())
    whole = [layer.experts.gate_up.unpack(torch.float32) for layer in model]
    keep_faster_experts(model, time)
    assert len(calls) == 2 * len(TOKENS), "layers of one shape are measured once"
    for layer, expected in zip(model, whole, strict=True):
        stack = layer.experts.gate_up
        if is_faster:
            assert plain_weight(stack) is None and plain_weight(layer.experts.down) is None
        else:
            assert stack.stored is None and torch.equal(stack.weight, expected)
            assert layer(torch.randn(3, 64)).shape == (3, 64)
    assert ("kept in codes (3.00 times" if is_faster else "dequantised (0.33 times") in caplog.text
    keep_faster_experts(torch.nn.Sequential(build_coded()), time)
    assert len(calls) == 2 * len(TOKENS), "the choice is remembered"


def test_experts_with_other_numbers_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setitem(CODED_EXPERTS._loaded, "reference", lambda x, ids, weights, **_: x * 2)
    layer = build_coded()
    keep_faster_experts(layer, lambda call: 1.0)
    assert layer.experts.gate_up.stored is None


@pytest.mark.usefixtures("breaks_kernels")
def test_experts_whose_kernels_do_not_run_are_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise CudaSourceError("cuModuleLoadData: no kernel image")

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setitem(CODED_EXPERTS._loaded, "reference", fail)
    layer = build_coded()
    keep_faster_experts(layer, lambda call: 1.0)
    assert layer.experts.gate_up.stored is None and "no kernel image" in caplog.text
    assert not (tmp_path / "coded_experts.json").exists(), "what does not run now is tried at the next start"


def test_what_did_not_fit_is_measured_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another GPU of the kind, or the same one by itself, may have the memory."""
    def run_out(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    layer = build_coded()
    with monkeypatch.context() as patched:
        patched.setattr(layer.experts.gate_up, "unpack", run_out)
        keep_faster_experts(layer, lambda call: 1.0)
    assert plain_weight(layer.experts.gate_up) is None and not (tmp_path / "coded_experts.json").exists()
    keep_faster_experts(layer, lambda call: 1.0)
    assert layer.experts.gate_up.stored is None
