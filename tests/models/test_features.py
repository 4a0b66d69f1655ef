"""Hidden states that drafters read, against those of transformers; and that reading them changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_cases import CASES, config_json, make_oracle, prompt
from harness import Harness, build_harness
from test_parity import TOLERANCE

from headrace.kernels.rowwise.reference import write_sum
from headrace.layers.batch import Features, FeatureSpec

FAMILIES = ("llama", "gemma3", "granite", "cohere", "qwen3-moe", "deepseek-v3", "olmo2", "starcoder2")


def capture(harness: Harness, tokens: list[int], spec: FeatureSpec, wanted: list[int] | None = None) -> Any:
    """``(features, hidden)`` of a first step."""
    batch = harness._batch([(harness.start(), tokens)])
    batch.features = Features(spec, write_sum)
    if wanted is not None:
        batch.wanted = harness._want(batch, wanted)
    with torch.inference_mode():
        hidden = harness.model.forward(batch)
    return batch.features.values, hidden


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_the_inputs_of_layers(name: str):
    oracle = make_oracle(*CASES[name])
    harness, tokens = build_harness(config_json(oracle), oracle.state_dict()), prompt(0)
    with torch.no_grad():
        states = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states  # the last one is normalised
    num_layers = len(states) - 1
    assert harness.model.captures_features
    layers = (num_layers - 1, 0, 1)
    values, hidden = capture(harness, tokens, FeatureSpec(layers, has_final=True))
    expected = torch.cat([*(states[i][0] for i in layers), states[-1][0]], dim=1)
    torch.testing.assert_close(values, expected, **TOLERANCE)
    assert torch.equal(values[:, -hidden.shape[1] :], hidden)


def test_what_enters_the_final_norm():
    oracle = make_oracle(*CASES["llama"])
    harness, tokens, seen = build_harness(config_json(oracle), oracle.state_dict()), prompt(0), []
    oracle.model.norm.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0][0]))
    with torch.no_grad():
        oracle(torch.tensor([tokens]))
    values, _ = capture(harness, tokens, FeatureSpec((2,)))
    torch.testing.assert_close(values, seen[0], **TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("spec", [FeatureSpec((0, 1)), FeatureSpec((1, 2)), FeatureSpec(has_final=True)])
def test_reading_features_changes_no_number(name: str, spec: FeatureSpec):
    """Also where the last layer is computed for the wanted tokens alone: features are of all tokens nevertheless."""
    oracle = make_oracle(*CASES[name])
    harness, tokens = build_harness(config_json(oracle), oracle.state_dict()), prompt(0)
    plain = harness.model.forward(harness._batch([(harness.start(), tokens)]))
    values, hidden = capture(harness, tokens, spec)
    assert torch.equal(hidden, plain)
    if harness.model.prunes_last_layer:
        pruned, last = capture(harness, tokens, spec, wanted=[0])
        assert torch.equal(pruned, values) and last.shape == (1, hidden.shape[1])
        torch.testing.assert_close(last, plain[-1:], **TOLERANCE)
