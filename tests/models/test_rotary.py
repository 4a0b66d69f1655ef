"""Rotary tables against transformers' frequency functions, at the longest context served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.base.errors import ConfigError
from headrace.layers.rotary import RotaryTable
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_rope
from headrace.models.gguf_config import divided_frequencies

CPU = torch.device("cpu")
NATIVE = 64
FACTORS = {"short_factor": [1.0 + i / 20 for i in range(16)], "long_factor": [1.0 + i for i in range(16)]}
TRAINED = {"original_max_position_embeddings": 48}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    "yarn-factor": {
        "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, **TRAINED
    },
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False, **TRAINED
    },
    "longrope": {"rope_type": "longrope", **FACTORS, **TRAINED},
    "longrope-factor": {"rope_type": "longrope", "factor": 32.0, **FACTORS, **TRAINED},
    "longrope-attention": {"rope_type": "longrope", "attention_factor": 1.19, **FACTORS, **TRAINED},
}


@pytest.mark.parametrize("length", [40, 64, 200])
@pytest.mark.parametrize("name", CASES)
def test_tables_match_transformers(name: str, length: int):
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=NATIVE,
        rope_parameters={"rope_theta": 5000.0, **CASES[name]},
    )
    kind = CASES[name]["rope_type"]
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
    spec = read_rope(Fields(config.to_dict()))
    table = RotaryTable(spec, length=length, device=CPU)
    torch.testing.assert_close(table.cos_sin, expected, atol=1e-5, rtol=1e-5)


def test_old_and_new_spelling_are_one():
    heads = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = read_rope(Fields({**heads, "rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}}))
    new = read_rope(Fields({**heads, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}}))
    assert old == new
    assert (new.theta, new.rotary_dim, new.scaling.kind) == (500000.0, 32, "llama3")


def test_divisors_from_a_file_replace_the_formula():
    """GGUF stores the divisors of the frequencies instead of the parameters they came from."""
    heads = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32
    }
    scaled = RotaryTable(read_rope(Fields({**heads, "rope_scaling": scaling})), length=50, device=CPU)
    plain = RotaryTable(read_rope(Fields(heads)), length=50, device=CPU)
    frequencies = [torch.atan2(table.cos_sin[1, 16:], table.cos_sin[1, :16]) for table in (plain, scaled)]
    divided = divided_frequencies((frequencies[0] / frequencies[1]).tolist())
    from_file = RotaryTable(read_rope(Fields({**heads, "rope_scaling": divided})), length=50, device=CPU)
    torch.testing.assert_close(from_file.cos_sin, scaled.cos_sin, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "factor": 2.0}}, "short_factor"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named) as caught:
        read_rope(Fields({"hidden_size": 64, "num_attention_heads": 2, **options}))
    assert caught.value.param == named
