"""Phi-4-multimodal: Phi-4-mini, SigLIP over crops of images, and a conformer over sound; arXiv:2503.01743.

Its LoRA weights for images and for sound are folders of their own, and are served as adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.base.errors import ConfigError
from headrace.base.media_facts import CroppedPixels, MediaFacts, OpenFrames
from headrace.layers.media_spec import MultimodalSpec, VisionSpec
from headrace.layers.names import SPLIT_NAMES, CheckpointNames, with_stacked_mlp, with_stacked_qkv
from headrace.layers.spec import Activation, NormSpec
from headrace.models.config_fields import MOST_LAYERS, Fields
from headrace.models.config_specs import (
    ACTIVATIONS,
    read_attention,
    read_decoder,
    read_layers,
    read_mlp,
    read_rope,
    read_window,
)
from headrace.models.family import Family, FamilyMedia

TEXT = {
    "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}
VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14,
}
AUDIO = {
    "hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24, "num_attention_heads": 16, "input_size": 80,
    "nemo_conv_channels": 1024, "kernel_size": 3, "bias_max_distance": 1000,
}
"""transformers' defaults."""
STRIDE = 8
"""Frames of 10 ms that one placeholder stands for."""
MOST_FRAMES = 180_000
"""Of a clip: 30 minutes."""


@dataclass(frozen=True)
class CropsSpec:
    """A vision transformer over crops of ``crop_side`` x ``crop_side`` patches. ``side``: rows and columns of the
    learned positions. ``last_layer`` is the one whose output is projected."""

    vision: VisionSpec
    patch_size: int
    side: int
    crop_side: int
    last_layer: int


@dataclass(frozen=True)
class ConformerSpec:
    """``num_channels`` are those of the convolutions over frames, ``kernel_size`` that of the blocks' convolutions,
    ``max_distance`` the largest that attention tells apart."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mels: int
    num_channels: int
    kernel_size: int
    max_distance: int
    mlp_activation: Activation
    glu_activation: Activation
    activation: Activation
    first_activation: Activation


@dataclass(frozen=True)
class SightAndSoundSpec:
    """Encoders of images and of sound."""

    crops: CropsSpec
    audio: ConformerSpec
    num_parts: int = 1

    tower: ClassVar[str] = "headrace.models.phi4_multimodal.tower:SightAndSoundTower"


def read_config(config: dict[str, Any]) -> MultimodalSpec:
    """LongRoPE is as in Phi-3: the short factors count if ``max_model_len`` is at most
    ``original_max_position_embeddings``, else the long ones, for all requests alike."""
    fields = Fields({**TEXT, **config})
    layers = read_layers(fields, read_rope(fields), window=read_window(fields))
    text = read_decoder(fields, layers, attention=read_attention(fields, qkv_bias=False, output_bias=False))
    return MultimodalSpec.of(text, SightAndSoundSpec(_read_crops(config), _read_audio(config)))


def _read_crops(config: dict[str, Any]) -> CropsSpec:
    fields = Fields({**VISION, **Fields(config).section("vision_config")})
    patch, count = fields.integer("patch_size"), fields.integer("num_hidden_layers")
    image, crop = fields.integer("image_size"), fields.integer("crop_size", 448)
    if image % patch or crop % (2 * patch):
        raise ConfigError(
            f"config.json: image_size ({image}) must be a multiple of patch_size ({patch}), and crop_size ({crop}) of "
            "twice as much", param="crop_size",
        )
    layer = fields.config.get("feature_layer", -2)
    if type(layer) is not int or not -count <= layer <= count or count > MOST_LAYERS:
        raise ConfigError(
            f"config.json: feature_layer must be one layer of {count}, got {layer!r}", param="feature_layer"
        )
    size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    vision = VisionSpec(
        size, count, heads, input_size=fields.integer("num_channels", 3) * patch**2,
        mlp=read_mlp(fields, default="gelu_pytorch_tanh", gated=False, bias=True),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-6), kind="layer", bias=True),
    )
    return CropsSpec(vision, patch, image // patch, crop // patch, layer if layer >= 0 else count + 1 + layer)


def _read_audio(config: dict[str, Any]) -> ConformerSpec:
    fields = Fields({**AUDIO, **Fields(config).section("audio_config")})
    size, count = fields.integer("hidden_size"), fields.integer("num_blocks")
    # what no published checkpoint has otherwise
    served = {
        "ext_pw_out_channel": size, "depthwise_separable_out_channel": size, "depthwise_multiplier": 1,
        "time_reduction": STRIDE, "chunk_size": -1, "bias_symmetric": False, "downsample_rate": 1,
    }
    for name, wanted in served.items():
        if (given := fields.config.get(name, wanted)) != wanted:
            raise ConfigError(f"config.json: {name} of audio_config must be {wanted}, got {given!r}", param=name)
    if size % fields.integer("num_attention_heads") or count > MOST_LAYERS:
        raise ConfigError(
            f"config.json: hidden_size ({size}) of audio_config must be a multiple of num_attention_heads, and "
            f"num_blocks ({count}) at most {MOST_LAYERS}", param="audio_config",
        )
    return ConformerSpec(
        size, fields.integer("intermediate_size"), count, fields.integer("num_attention_heads"),
        fields.integer("input_size"), fields.integer("nemo_conv_channels"), fields.integer("kernel_size"),
        fields.integer("bias_max_distance"), mlp_activation=fields.choice("activation", ACTIVATIONS, "swish"),
        glu_activation=fields.choice("conv_glu_type", ACTIVATIONS, "swish"),
        activation=fields.choice("conv_activation", ACTIVATIONS, "swish"),
        first_activation=fields.choice("nemo_activation", ACTIVATIONS, "relu"),
    )


def read_media(config: dict[str, Any]) -> MediaFacts:
    """Images and sound. Beside images sound is projected otherwise."""
    crops, audio = _read_crops(config), _read_audio(config)
    channels = crops.vision.input_size // crops.patch_size**2
    vision, sound = (Fields(Fields(config).section(f"{name}_config")) for name in ("vision", "audio"))
    return MediaFacts(
        token_ids={
            "image": vision.integer("image_token_id", 200010), "audio": sound.integer("audio_token_id", 200011)
        },
        texts={"image": "<|image|>", "audio": "<|audio|>"},
        vector_size=Fields({**TEXT, **config}).integer("hidden_size"),
        pixels=CroppedPixels(channels, crops.crop_side * crops.patch_size, crops.crop_side),
        frames=OpenFrames(audio.num_mels, MOST_FRAMES, STRIDE), beside={"audio": "image"},
    )


def find_arrays(made: dict[str, Any]) -> dict[str, Any]:
    """What the processor makes of one item, in the words of all families: of an image the patches in use and the crops,
    ``[rows, columns, rows of crops, columns of crops]``, in the place of a mask; of a clip its frames."""
    found: dict[str, Any] = {"input_ids": made["input_ids"]}
    if "image_pixel_values" in made:
        pixels, mask = made["image_pixel_values"][0], made["image_attention_mask"][0]
        down, across = (int(size) // pixels.shape[-1] for size in made["image_sizes"][0])
        crops = mask[1:].reshape(down, across, *mask.shape[1:])
        # what is used is a rectangle from the left upper corner on
        rows, columns = crops[:, 0, :, 0].sum(), crops[0, :, 0].sum()
        found |= {"pixel_values": pixels, "image_sizes": [[int(rows), int(columns), down, across]]}
    if "audio_input_features" in made:
        frames = made["audio_input_features"]
        found |= {"input_features": frames, "image_sizes": [[frames.shape[1]]]}
    return found


IMAGES, SOUND = "model.embed_tokens_extend.image_embed.", "model.embed_tokens_extend.audio_embed."
LAYER, OWN_LAYER = f"{IMAGES}img_processor.encoder.layers.{{i}}", "encoder.crops.blocks.{i}"
BLOCK, OWN_BLOCK = f"{SOUND}encoder.encoders.{{i}}", "encoder.audio.blocks.{i}"
ENCODERS = {
    f"{IMAGES}img_processor.embeddings.patch_embedding": "encoder.crops.patches",
    f"{IMAGES}img_processor.embeddings.position_embedding.weight": "encoder.crops.positions",
    f"{IMAGES}img_projection_up": "encoder.crops.projector.up",
    f"{IMAGES}img_projection_down": "encoder.crops.projector.down",
    f"{IMAGES}global_img_feature_extensor": "encoder.crops.separator",
    f"{IMAGES}sub_img_feature_extensor": "encoder.crops.newline",
    f"{LAYER}.layer_norm1": f"{OWN_LAYER}.attention_norm",
    f"{LAYER}.layer_norm2": f"{OWN_LAYER}.mlp_norm",
    f"{LAYER}.self_attn.q_proj": f"{OWN_LAYER}.qkv#q",
    f"{LAYER}.self_attn.k_proj": f"{OWN_LAYER}.qkv#k",
    f"{LAYER}.self_attn.v_proj": f"{OWN_LAYER}.qkv#v",
    f"{LAYER}.self_attn.out_proj": f"{OWN_LAYER}.output",
    f"{LAYER}.mlp.fc1": f"{OWN_LAYER}.mlp.up",
    f"{LAYER}.mlp.fc2": f"{OWN_LAYER}.mlp.down",
    f"{SOUND}encoder.encoder_embedding.global_mean": "encoder.audio.mean",
    f"{SOUND}encoder.encoder_embedding.global_invstd": "encoder.audio.inverse_std",
    f"{SOUND}encoder.embed.conv.0": "encoder.audio.frames.first",
    f"{SOUND}encoder.embed.conv.2": "encoder.audio.frames.stages.0.depthwise",
    f"{SOUND}encoder.embed.conv.3": "encoder.audio.frames.stages.0.pointwise",
    f"{SOUND}encoder.embed.conv.5": "encoder.audio.frames.stages.1.depthwise",
    f"{SOUND}encoder.embed.conv.6": "encoder.audio.frames.stages.1.pointwise",
    f"{SOUND}encoder.embed.out": "encoder.audio.frames.output",
    f"{SOUND}encoder.relative_attention_bias_layer.bias_values.weight": "encoder.audio.distances",
    f"{SOUND}up_proj_for_speech": "encoder.alone.up",
    f"{SOUND}down_proj_for_speech": "encoder.alone.down",
    f"{SOUND}up_proj_for_vision_speech": "encoder.beside_images.up",
    f"{SOUND}down_proj_for_vision_speech": "encoder.beside_images.down",
    **{
        f"{BLOCK}.feed_forward_{end}.{theirs}": f"{OWN_BLOCK}.mlp_{end}.{ours}"
        for end in ("in", "out")
        for theirs, ours in (("layer_norm", "norm"), ("gate_up_proj", "up_gate"), ("down_proj", "down"))
    },
    f"{BLOCK}.layer_norm_att": f"{OWN_BLOCK}.attention_norm",
    f"{BLOCK}.self_attn.q_proj": f"{OWN_BLOCK}.qkv#q",
    f"{BLOCK}.self_attn.k_proj": f"{OWN_BLOCK}.qkv#k",
    f"{BLOCK}.self_attn.v_proj": f"{OWN_BLOCK}.qkv#v",
    f"{BLOCK}.self_attn.o_proj": f"{OWN_BLOCK}.output",
    f"{BLOCK}.conv.layer_norm": f"{OWN_BLOCK}.convolution.norm",
    f"{BLOCK}.conv.glu.ext_pw_conv_1d": f"{OWN_BLOCK}.convolution.value_gate",
    f"{BLOCK}.conv.glu.b1": f"{OWN_BLOCK}.convolution.value_bias",
    f"{BLOCK}.conv.glu.b2": f"{OWN_BLOCK}.convolution.gate_bias",
    f"{BLOCK}.conv.dw_sep_conv_1d.dw_conv": f"{OWN_BLOCK}.convolution.depthwise",
    f"{BLOCK}.conv.dw_sep_conv_1d.pw_conv": f"{OWN_BLOCK}.convolution.pointwise",
    f"{BLOCK}.conv.ext_pw_conv_1d": f"{OWN_BLOCK}.convolution.output",
    f"{BLOCK}.layer_norm": f"{OWN_BLOCK}.norm",
}

FAMILY = Family(
    name="phi4_multimodal",
    architectures=("Phi4MultimodalForCausalLM",),
    read_config=read_config,
    names=CheckpointNames(
        {**with_stacked_qkv(with_stacked_mlp(SPLIT_NAMES)), **ENCODERS},
        ignored=(f"{IMAGES}img_processor.post_layernorm.", f"{IMAGES}img_processor.head."),
    ),
    media=FamilyMedia(read_media, outputs=find_arrays),
)
