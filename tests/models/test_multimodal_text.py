"""The text part of multimodal Gemma 3 files, as they name their tensors and nest their configs, against
transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from harness import build_harness

from headrace.base.errors import ConfigError, UnknownArchitecture
from headrace.models.catalog import find_family

ARCHITECTURE = "Gemma3ForConditionalGeneration"
TEXT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20,
    "max_position_embeddings": 128,
    "initializer_range": 0.2, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14
}


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    images = {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=dict(TEXT), vision_config=VISION, **images)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def older_name(name: str) -> str:
    """As files published with the model have it."""
    name = name.replace("model.language_model.", "language_model.model.").replace("lm_head.", "language_model.lm_head.")
    return (
        name.removeprefix("model.") if name.startswith(("model.vision_tower.", "model.multi_modal_projector."))
        else name
    )


@pytest.mark.parametrize("is_older", [True, False])
def test_logits_equal_those_of_the_whole_model(oracle: transformers.PreTrainedModel, is_older: bool):
    config: dict[str, Any] = (
        {"architectures": [ARCHITECTURE], "text_config": TEXT} if is_older
        else {**oracle.config.to_dict(), "architectures": [ARCHITECTURE]}
    )
    tensors = {older_name(name) if is_older else name: tensor for name, tensor in oracle.state_dict().items()}
    harness = build_harness(config, tensors)
    assert [layer.attention.params.window for layer in harness.model.layers] == [6, 0, 6, 0]
    tokens = torch.randint(2, 90, (23,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    sequence = harness.start()
    found = torch.cat(
        [harness.step((sequence, tokens[:10]))[0], *(harness.step((sequence, [token]))[0] for token in tokens[10:])]
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_published_config_leaves_out_what_equals_the_defaults():
    published = {
        "architectures": [ARCHITECTURE], "eos_token_id": [1, 106], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }
    family = find_family(ARCHITECTURE)
    filled = transformers.Gemma3TextConfig(
        **{**published["text_config"], "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    ).to_dict()
    assert family.read_config(published) == family.read_config({**filled, "architectures": ["Gemma3ForCausalLM"]})
    with pytest.raises(ConfigError, match="text_config"):
        family.read_config({**published, "text_config": None})


@pytest.mark.parametrize(
    "architecture",
    [
        "Llama4ForConditionalGeneration", "Gemma3nForConditionalGeneration",
        "Gemma3nForCausalLM"
    ]
)
def test_architectures_that_only_sound_alike_are_refused(architecture: str):
    with pytest.raises(UnknownArchitecture, match=architecture):
        find_family(architecture)
