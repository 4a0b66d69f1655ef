"""GLM-4 dense, both generations: half of each head is rotated, in neighbouring pairs; the newer one adds post-norms."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.names import SPLIT_NAMES, CheckpointNames, GgufNaming, with_stacked_mlp
from headrace.layers.spec import DecoderSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_layers, read_rope
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": True}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``attention_bias`` applies to q, k and v, not to the output projection."""
    fields = Fields({**DEFAULTS, **config})
    rope = read_rope(fields, partial=0.5, interleaved=True)
    return read_decoder(
        fields, read_layers(fields, rope), attention=read_attention(fields, output_bias=False),
        norm=NormSpec(fields.number("rms_norm_eps", 1.5625e-7), after=config["architectures"][0].startswith("Glm4")),
    )


FAMILY = Family(
    name="glm4",
    architectures=decoder_architectures("Glm4", "Glm"),
    read_config=read_config,
    names=CheckpointNames({
        **with_stacked_mlp(SPLIT_NAMES),
        "model.layers.{i}.post_self_attn_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.post_mlp_layernorm": "layers.{i}.mlp_post_norm",
    }),
    gguf_architectures=("glm4",),
    gguf_config=partial(read_gguf_config, architecture="Glm4ForCausalLM"),
    # checkpoints call the norm before the MLP post_attention_layernorm, as Llama does, and the norms after the
    # branches post_self_attn_layernorm and post_mlp_layernorm
    gguf_naming=GgufNaming({
        "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }),
)
