"""Mixtures of experts on a device that is not there: no operation mixes its tensors with the host's, and nothing waits
for it but what says so."""

from __future__ import annotations

from typing import Any

import deepseek_v4_tiny
import pytest
import torch
from family_cases import CASES, config_json, make_oracle, prompt
from harness import build_harness
from pretended_device import DEVICE, PretendedDevice

from headrace.kernels.moe.reference import grouped_linear
from headrace.models.deepseek_v4.model import DeepseekV4Model
from headrace.models.weights.dummy import fill_dummy_weights

MAY_WAIT = {
    "tolist kernels/moe/reference.py grouped_linear", "where layers/attention/reference.py _make_bucket",
    "tolist layers/moe/mxfp4.py run"
}
"""The plain products of groups of rows and plain attention, which a GPU has better ones for; experts in 4 bits when
tokens are many."""


ON_A_GPU = "grouped"
"""Experts that a GPU has, too."""


def check(device: PretendedDevice, may_wait: set[str]) -> None:
    assert not device.mixed
    assert set(device.waits) <= may_wait


def test_what_it_notices():
    with PretendedDevice() as device:
        there, here = torch.ones(4, device=DEVICE), torch.ones(4)
        assert there.device == DEVICE == there[1:].device == (there * 2).device and here.device == torch.device("cpu")
        assert (here.to(DEVICE) + there).device == DEVICE and not device.mixed
        there + here
        assert device.mixed == ["add a test"] and not device.waits
        grouped_linear(
            torch.ones(2, 3, device=DEVICE), torch.ones(1, 3, 3, device=DEVICE), None, torch.tensor([2], device=DEVICE),
            torch.zeros(2, device=DEVICE)
        )
        assert device.waits == ["tolist kernels/moe/reference.py grouped_linear"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_families(name: str):
    model = make_oracle(*CASES[name])
    with PretendedDevice() as device:
        harness = build_harness(
            config_json(model), model.state_dict(), page_size=16, device=DEVICE, moe_experts=ON_A_GPU
        )
        adopt(device, harness)
        first, second = harness.start(), harness.start()
        harness.step((first, prompt(0)), (second, prompt(1, 7)))
        harness.step((first, prompt(2, 1)), (second, prompt(3, 5)))
        check(device, MAY_WAIT)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("expert_dtype", [None, "fp4"])
def test_deepseek_v4(kv_dtype: str, expert_dtype: str | None, monkeypatch: pytest.MonkeyPatch):
    """Steps that begin, cross and end windows and pages, with few tokens and many."""
    options: dict[str, Any] = {
        "head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64, "expert_dtype": expert_dtype
    }
    monkeypatch.setattr(DeepseekV4Model, "load_weights", lambda self, tensors: fill_dummy_weights(self, 0))
    with PretendedDevice() as device:
        harness = deepseek_v4_tiny.build_harness(
            deepseek_v4_tiny.published_config(**options), {}, page_size=256, max_len=512, num_sequences=2,
            kv_dtype=kv_dtype, device=DEVICE,
            moe_experts="auto" if expert_dtype else ON_A_GPU,
        )
        adopt(device, harness)
        for place in (place for layer in harness.model.layers for place in layer.attention.places()):
            device.adopt((place.pages.k, place.pages.v))
        first, second = harness.start(), harness.start()
        for lengths in ((30, 200), (1, 3), (3, 1), (290, 1), (1, 1)):
            harness.step((first, [1] * lengths[0]), (second, [2] * lengths[1]))
        check(device, MAY_WAIT)


def adopt(device: PretendedDevice, harness: Any) -> None:
    """What was made where modes do not see it; from here on everything counts."""
    device.adopt((*harness.model.parameters(), *harness.model.buffers()))
    device.mixed.clear()
    device.waits.clear()
