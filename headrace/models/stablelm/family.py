"""StableLM 2 and 3B: layer norms, a quarter of each head rotated."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import ConfigError
from headrace.layers.spec import DecoderSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_layers, read_rope
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {"max_position_embeddings": 4096}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """Raises `ConfigError` for norms of queries and keys, which the 12B model alone has."""
    fields = Fields({**DEFAULTS, **config})
    if fields.flag("qk_layernorm", False):
        raise ConfigError(
            "config.json: qk_layernorm must be false; this family has no such norms", param="qk_layernorm"
        )
    is_parallel = fields.flag("use_parallel_residual", False)
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, partial=0.25)),
        attention=read_attention(fields, qkv_bias=fields.flag("use_qkv_bias", False), output_bias=False),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        block="parallel_one_norm" if is_parallel else "sequential",
    )


FAMILY = Family(
    name="stablelm",
    architectures=decoder_architectures("StableLm"),
    read_config=read_config,
)
