"""Reads what configs of models with Whisper's encoder have in common. Torch-free."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from headrace.layers.media_spec import AudioSpec, VisionSpec
from headrace.layers.spec import MlpSpec, NormSpec
from headrace.models.config_fields import MOST_LAYERS, Fields
from headrace.models.config_specs import ACTIVATIONS

NORM = NormSpec(1e-5, kind="layer", bias=True)


def read_audio_encoder(fields: Fields) -> AudioSpec:
    """The encoder's part of a config; raises `ConfigError`."""
    size, heads, layers = (fields.integer(name) for name in ("d_model", "encoder_attention_heads", "encoder_layers"))
    if size % heads or layers > MOST_LAYERS:
        raise ConfigError(
            f"config.json: d_model ({size}) must be a multiple of encoder_attention_heads ({heads}), and "
            f"encoder_layers ({layers}) at most {MOST_LAYERS}", param="d_model",
        )
    if fields.flag("scale_embedding", False):
        raise ConfigError(
            "config.json: scale_embedding is true; encoders are served without a scale", param="scale_embedding"
        )
    num_mels = fields.integer("num_mel_bins", 80)
    mlp = MlpSpec(
        fields.integer("encoder_ffn_dim"), fields.choice("activation_function", ACTIVATIONS, "gelu"), True, gated=False
    )
    blocks = VisionSpec(size, layers, heads, input_size=3 * num_mels, mlp=mlp, norm=NORM)
    return AudioSpec(blocks, num_mels, fields.integer("max_source_positions", 1500))


def audio_names(theirs: str, ours: str) -> dict[str, str]:
    """Names of the encoder's tensors, to be added to a table. ``theirs`` and ``ours`` are prefixes."""
    block, own = f"{theirs}layers.{{i}}", f"{ours}blocks.{{i}}"
    return {
        f"{theirs}conv1": f"{ours}first",
        f"{theirs}conv2": f"{ours}second",
        f"{theirs}embed_positions.weight": f"{ours}positions",
        f"{theirs}layer_norm": f"{ours}norm",
        f"{block}.self_attn_layer_norm": f"{own}.attention_norm",
        f"{block}.final_layer_norm": f"{own}.mlp_norm",
        f"{block}.self_attn.q_proj": f"{own}.qkv#q",
        f"{block}.self_attn.k_proj": f"{own}.qkv#k",
        f"{block}.self_attn.v_proj": f"{own}.qkv#v",
        f"{block}.self_attn.out_proj": f"{own}.output",
        f"{block}.fc1": f"{own}.mlp.up",
        f"{block}.fc2": f"{own}.mlp.down",
    }
