"""Experts whose activations are rounded: got by name alone, and refused with the reason where they cannot be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.base.errors import ConfigError
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.kernels.operation import KernelQuery
from headrace.layers.moe.contract import EXPERTS
from headrace.layers.moe.pairing import choose_pair
from headrace.layers.moe.rounded import check_rounded


def test_layers_get_it_by_name_alone():
    shape = {"width": 2880, "expert_width": 2880, "num_experts": 32, "top_k": 4, "ranks": 1, "mxfp4": 0}
    query = KernelQuery("cuda", "bfloat16", (9, 0), shape)
    assert choose_pair(query)[1] == "fused" and choose_pair(query, experts="rounded") == ("none", "rounded")
    four_bits = KernelQuery("cuda", "bfloat16", (9, 0), shape | {"width": 4096, "expert_width": 2048, "mxfp4": 1})
    assert choose_pair(four_bits)[1] == "mxfp4_fused" and choose_pair(four_bits, experts="rounded")[1] == "rounded"
    for other, reason in (
        (KernelQuery("cpu", "bfloat16", (0, 0), shape), "needs a cuda device"),
        (KernelQuery("cuda", "bfloat16", (10, 0), shape), "needs Hopper"),
        (KernelQuery("cuda", "float16", (9, 0), shape), "not float16"),
        (KernelQuery("cuda", "bfloat16", (9, 0), shape | {"expert_width": 360}), "steps of 16"),
        (KernelQuery("cuda", "bfloat16", (9, 0), shape | {"moves": 1}), "dequantised"),
    ):
        assert EXPERTS.names()[-1] == "rounded", "auto never takes it"
        with pytest.raises(ConfigError, match=reason) as caught:
            choose_pair(other, experts="rounded")
        assert caught.value.param == "moe_experts"


def test_weights_in_other_forms_are_refused():
    codes, powers = (torch.zeros(256, width, dtype=torch.uint8) for width in (128, 8))
    mxfp4 = DeviceCodes(Code.E2M1, 192, codes, powers, 32)
    fp8 = DeviceCodes(Code.E4M3, 192, torch.zeros(256, 192).to(torch.float8_e4m3fn), torch.ones(256, 1), 192)
    stacks = {
        name: SimpleNamespace(stored=codes and object.__new__(CodedWeight), codes=codes)
        for name, codes in (("mxfp4", mxfp4), ("e4m3", fp8), ("plain", None))
    }
    good: Any = stacks["mxfp4"]
    check_rounded((good, good))
    for name in ("e4m3", "plain"):
        bad: Any = stacks[name]
        with pytest.raises(ConfigError, match=name) as caught:
            check_rounded((good, bad))
        assert caught.value.param == "moe_experts"
