"""StarCoder2: layer norms, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.layers.names import UNGATED_NAMES, CheckpointNames, GgufNaming
from headrace.layers.spec import DecoderSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_layers,
    read_mlp,
    read_rope,
    read_vocabulary,
    read_window,
)
from headrace.models.family import Family, decoder_architectures
from headrace.models.gguf_config import read_gguf_config


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """``use_bias`` is for all products."""
    fields = Fields({"max_position_embeddings": 4096, "num_key_value_heads": 2, **config})
    bias = fields.flag("use_bias", True)
    return read_decoder(
        fields, read_layers(fields, read_rope(fields), window=read_window(fields)),
        attention=read_attention(fields, qkv_bias=bias, output_bias=bias),
        mlp=read_mlp(fields, default="gelu_pytorch_tanh", bias=bias, gated=False),
        norm=NormSpec(fields.number("norm_epsilon", 1e-5), kind="layer", bias=True),
        vocabulary=read_vocabulary(fields, tied=True),
    )


FAMILY = Family(
    name="starcoder2",
    architectures=decoder_architectures("Starcoder2"),
    read_config=read_config,
    names=CheckpointNames(UNGATED_NAMES, renames={".c_fc.": ".up_proj.", ".c_proj.": ".down_proj."}),
    gguf_architectures=("starcoder2",),
    gguf_config=partial(
        read_gguf_config, architecture="Starcoder2ForCausalLM", keys={"attention.layer_norm_epsilon": "norm_epsilon"}
    ),
    gguf_naming=GgufNaming(parts={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
)
