"""An `EncoderSpec` from the usual fields of config.json. Torch-free."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from headrace.layers.spec import EncoderSpec, EncoderTables
from headrace.models.config_fields import Fields, read_num_classes, read_num_layers
from headrace.models.decoder_config import read_mlp


def read_encoder(fields: Fields, *, first_position: int, norm_eps: float) -> EncoderSpec:
    """The encoder a config describes; raises `ConfigError` for relative positions and for one made into a decoder."""
    fields.choice("position_embedding_type", {"absolute": "absolute"}, "absolute")
    if fields.flag("is_decoder", False):
        raise ConfigError("config.json: is_decoder must be false; this family serves encoders", param="is_decoder")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})",
            param="num_attention_heads"
        )
    tables = EncoderTables(
        fields.integer("vocab_size"), fields.integer("max_position_embeddings", 512), first_position,
        fields.integer("type_vocab_size", 2),
    )
    return EncoderSpec(
        hidden_size=hidden_size, num_heads=num_heads, num_layers=read_num_layers(fields),
        mlp=read_mlp(fields, default="gelu", bias=True, gated=False),
        norm_eps=fields.number("layer_norm_eps", norm_eps),
        tables=tables,
        num_classes=read_num_classes(fields.config),
    )
