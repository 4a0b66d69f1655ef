"""StableLM 2 and 3B: layer norms, a quarter of each head rotated."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import SPLIT_NAMES, CheckpointNames
from headrace.layers.spec import DecoderSpec, NormSpec
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder, read_layers, read_rope
from headrace.models.family import Family, decoder_architectures

DEFAULTS = {"max_position_embeddings": 4096}
NAMES = {
    **{theirs: ours for theirs, ours in SPLIT_NAMES.items() if not theirs.endswith(("q_norm", "k_norm"))},
    **{
        f"model.layers.{{i}}.self_attn.{of}_layernorm.norms.{{x}}": f"layers.{{i}}.attention.{of}_norm#{{x}}"
        for of in ("q", "k")
    },
}


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """The 12B model alone normalises queries and keys (``qk_layernorm``)."""
    fields = Fields({**DEFAULTS, **config})
    qk_norm = "layer" if fields.flag("qk_layernorm", False) else "none"
    is_parallel = fields.flag("use_parallel_residual", False)
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, partial=0.25)),
        attention=read_attention(
            fields, qkv_bias=fields.flag("use_qkv_bias", False), output_bias=False, qk_norm=qk_norm
        ),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        block="parallel_one_norm" if is_parallel else "sequential",
    )


FAMILY = Family(
    name="stablelm",
    architectures=decoder_architectures("StableLm"),
    read_config=read_config,
    names=CheckpointNames(NAMES),
)
