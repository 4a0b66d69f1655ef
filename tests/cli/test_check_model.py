"""``headrace check MODEL``: what becomes of each kind of layer, told without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layers.format_cases import CASES, LLAMA, QWEN_MOE, make_checkpoint

from headrace.kernels import native
from headrace.kernels.coded_linear import choice
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_fp4, quantise_integer
from headrace.service.weight_report import _judge_expert, _judge_on_gpu
from headrace.serving.cli.main import main


def report(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    assert main(["check", str(folder), "--json"]) == 0
    return {kind["name"]: kind for kind in json.loads(capsys.readouterr().out)["weights"]}


@pytest.fixture(autouse=True)
def _native_library():
    if native.build().status != "ready":
        pytest.skip("no native library")


def test_forms_kernels_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "m", LLAMA, CASES["gptq-order"])
    kinds = report(tmp_path / "m", capsys)
    down = kinds["model.layers.*.mlp.down_proj"]
    assert down["count"] == 2 and down["shape"] == [128, 192]
    assert down["form"] == "int of 4 bits, a scale and a zero point for 32 inputs, in activation order"
    assert down["kernel"] == "own kernels, packed" and down["reason"] == "4 bits in groups of 32, inputs permuted"
    assert kinds["lm_head"]["form"] == "float32" and len(kinds) == 9


def test_experts_and_dequantised_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "m", QWEN_MOE, CASES["fp8-block"])
    kinds = report(tmp_path / "m", capsys)
    gate = kinds["model.layers.*.mlp.experts.*.gate_proj"]
    assert gate["count"] == 8 and "e4m3 of 8 bits, a scale for 64 x 128" in gate["form"]
    assert "dequantised" in gate["kernel"] and gate["reason"] == "no kernel here multiplies e4m3 codes"
    assert main(["check", str(tmp_path / "m")]) == 0
    assert "model.layers.*.mlp.experts.*.gate_proj" in capsys.readouterr().out


def test_groups_that_no_kernel_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "m", LLAMA, CASES["gptq-groups-of-16"])
    assert "these have 16" in report(tmp_path / "m", capsys)["model.layers.*.self_attn.o_proj"]["reason"]


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "/nowhere/model"]) != 0
    assert "/nowhere/model" in capsys.readouterr().err


def test_experts_on_a_gpu_are_multiplied_together():
    """Not by the products of other layers."""
    cpu, weight = torch.device("cpu"), torch.randn(64, 256)
    kernel, reason = _judge_expert(quantise_fp4(weight), cpu, torch.bfloat16)
    assert kernel == "coded experts kernel reference" and "1 to 256 tokens" in reason
    kernel, reason = _judge_expert(quantise_float(weight, rows=48, group=128), cpu, torch.bfloat16)
    assert kernel == "dequantised" and "do not divide the 64" in reason


@pytest.mark.parametrize(("plain_s", "kernel"), [(2.0, "own or library kernels by rows"), (0.3, "dequantised")])
def test_layers_on_a_gpu_are_judged_by_what_was_measured(
    plain_s: float, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Here with the solutions that a CPU has, and times of a clock."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (0, 0))
    monkeypatch.setattr(choice, "time_chain", lambda calls: plain_s if calls[0].func is F.linear else 1.0)
    form = quantise_integer(torch.randn(64, 256), 4, 32)
    found, reason = _judge_on_gpu(form, torch.device("cpu"), torch.float32)
    assert found == kernel and f"{plain_s:.2f} times as fast" in reason
    if plain_s > 1:
        assert "reference" in reason and "of its memory" in reason
