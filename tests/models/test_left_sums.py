"""Products that leave sums for the norm after them, as kernels that share the inputs do, or add to the residual
themselves: the model computes the same."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES, config_json, make_oracle, prompt
from harness import Harness, build_harness

from headrace.kernels.linear import LINEAR_SUMS, reference

LEAVES = {
    "llama": True, "llama-tied-biased": True, "qwen3": True, "mixtral": True, "gemma3": False, "olmo2": False,
    "granite": False, "deepseek-v3": True
}
"""Whether any branch of the family goes to a norm as it is: neither scaled nor normalised before it is added."""


def build(case: str) -> Harness:
    oracle = make_oracle(*CASES[case])
    return build_harness(config_json(oracle), oracle.state_dict())


WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64
}


def decode(harness: Harness) -> torch.Tensor:
    first, second = harness.start(), harness.start()
    logits = harness.step((first, prompt(0, 5)), (second, prompt(1, 9)))
    logits += harness.step((first, [3]), (second, [4]))
    wanted = [0] if harness.model.prunes_last_layer else None
    return torch.cat(logits + harness.step((first, [5]), (second, prompt(2, 6)), wanted=wanted))


@pytest.mark.parametrize("case", LEAVES)
def test_logits(case: str, monkeypatch: pytest.MonkeyPatch):
    expected, left = decode(build(case)), []

    def leave_halves(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        half = x.shape[1] // 2
        left.append(
            torch.stack(
                [
                    reference.linear(x[:, :half], weight[:, :half], bias),
                    reference.linear(x[:, half:], weight[:, half:], None)
                ]
            )
        )
        return left[-1]

    monkeypatch.setattr(LINEAR_SUMS, "choose", lambda query: leave_halves)
    torch.testing.assert_close(decode(build(case)), expected, atol=1e-5, rtol=1e-4)
    assert bool(left) == LEAVES[case]


@pytest.mark.parametrize("case", LEAVES)
def test_logits_of_products_added_in_place(case: str, monkeypatch: pytest.MonkeyPatch):
    expected, added = decode(build(case)), []

    def add_to_residual(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor | None:
        out = reference.linear(x, weight, bias)
        added.append(residual is not None)
        if residual is None:
            return out
        residual.add_(out)
        return None

    monkeypatch.setattr(LINEAR_SUMS, "choose", lambda query: add_to_residual)
    assert torch.equal(decode(build(case)), expected)
    assert any(added) == LEAVES[case]


@pytest.mark.cuda
def test_logits_on_hopper(monkeypatch: pytest.MonkeyPatch):
    """A model wide enough for its kernels: one product in a kernel with the activation, two that leave sums, one as it
    is."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    from headrace.kernels.linear import hopper

    oracle, multiply, ways = make_oracle("Qwen2", WIDE), hopper.multiply, set()

    def take_note(x, weight, bias, tile, activation=""):
        ways.add((bool(activation), tile.splits > 1))
        return multiply(x, weight, bias, tile, activation)

    def build_wide(dtype: torch.dtype) -> Harness:
        return build_harness(config_json(oracle), oracle.state_dict(), dtype=dtype, device=torch.device("cuda"))

    expected = decode(build_wide(torch.float32))
    monkeypatch.setattr(hopper, "multiply", take_note)
    error = (decode(build_wide(torch.bfloat16)) - expected).norm() / expected.norm()
    assert ways == {(True, False), (False, True), (False, False)}
    with monkeypatch.context() as without:
        without.setenv("HEADRACE_DISABLE_PLUGINS", "gluon_pdl")
        plain = (decode(build_wide(torch.bfloat16)) - expected).norm() / expected.norm()
    assert error < 1.2 * plain + 1e-3 and plain < 5e-2
