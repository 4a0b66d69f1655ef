"""Whisper: an encoder of sound and a decoder that attends to its output; arXiv:2212.04356.

A window of sound stands at the beginning of the prompt as placeholders. What a layer caches at their positions are the
keys and values of its attention to the encoder's output; behind them are those of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts, SpeechFacts, WindowFrames
from headrace.layers.media_spec import AudioSpec
from headrace.layers.names import CheckpointNames
from headrace.layers.spec import MlpSpec, NormSpec
from headrace.models.audio_fields import NORM, audio_names, read_audio_encoder
from headrace.models.config_fields import MOST_LAYERS, Fields
from headrace.models.config_specs import ACTIVATIONS
from headrace.models.family import Family, FamilyMedia
from headrace.parallel.division import Division

KV_DTYPES = ("float32", "bfloat16", "float16")
ALIGNMENT = 64
"""Placeholders of a window are a multiple of this: text then begins with a page of its own."""
NUM_TIMES = 1501
"""Time stamps of 20 ms each, at the end of the vocabulary."""
MULTILINGUAL = 51865
"""Tokens of the smallest vocabulary with languages; models for English alone have fewer."""
MOST_HEADS = 64
"""Of which attention to sound is looked at: one has 1.3 MB for a window of 224 tokens."""
MARKS_BEFORE_TIMES = 4
"""``<|startoflm|>``, which no prompt holds, stands this far before the first time stamp."""


@dataclass(frozen=True)
class WhisperSpec:
    """``num_positions`` are those of text. ``num_placeholders`` of a window include some behind its sound, which
    nothing attends to."""

    hidden_size: int
    num_heads: int
    num_layers: int
    vocab_size: int
    num_positions: int
    mlp: MlpSpec
    audio: AudioSpec
    norm: NormSpec = NORM

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_placeholders(self) -> int:
        return -(-self.audio.num_positions // ALIGNMENT) * ALIGNMENT

    @property
    def max_model_len(self) -> int:
        return self.num_placeholders + self.num_positions

    def check_division(self, division: Division) -> None:
        """Of the decoder (`headrace.parallel.division.Divisible`): ranks encode sound each for itself."""
        division.check_has_experts(0)
        division.check_vocabulary(self.vocab_size)
        division.check_heads(self.num_heads, self.num_heads)
        self.mlp.check_division(division)


def read_config(config: dict[str, Any]) -> WhisperSpec:
    """Raises `ConfigError`."""
    fields = Fields(config)
    size, heads = fields.integer("d_model"), fields.integer("decoder_attention_heads")
    layers = fields.integer("decoder_layers")
    if size % heads or layers > MOST_LAYERS:
        raise ConfigError(
            f"config.json: d_model ({size}) must be a multiple of decoder_attention_heads ({heads}), and "
            f"decoder_layers ({layers}) at most {MOST_LAYERS}", param="d_model",
        )
    mlp = MlpSpec(
        fields.integer("decoder_ffn_dim"), fields.choice("activation_function", ACTIVATIONS, "gelu"), True, gated=False
    )
    return WhisperSpec(
        size, heads, layers, fields.integer("vocab_size"), fields.integer("max_target_positions", 448), mlp,
        read_audio_encoder(fields),
    )


def cache_specs(spec: WhisperSpec, kv_dtype: str) -> list[CacheSpec | None]:
    """All layers alike. Raises `ConfigError` for 8-bit keys and values."""
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype {kv_dtype}: this model keeps keys and values in {', '.join(KV_DTYPES)}", param="kv_dtype"
        )
    return [CacheSpec("full", spec.num_heads, spec.head_dim, spec.head_dim, kv_dtype)] * spec.num_layers


def read_media(config: dict[str, Any]) -> MediaFacts:
    """One window of sound, which every prompt begins with."""
    spec = read_config(config)
    token_id = spec.vocab_size - NUM_TIMES - MARKS_BEFORE_TIMES
    return MediaFacts(
        token_ids={"audio": token_id if token_id >= 0 else spec.vocab_size - 1}, texts={"audio": "<|startoflm|>"},
        vector_size=spec.hidden_size,
        frames=WindowFrames(spec.audio.num_mels, spec.audio.num_frames, spec.num_placeholders),
        speech=_read_speech(config, spec),
    )


def _read_speech(config: dict[str, Any], spec: WhisperSpec) -> SpeechFacts:
    fields = Fields(config)
    banned, first = (_read_ids(config, name, spec) for name in ("suppress_tokens", "begin_suppress_tokens"))
    return SpeechFacts(
        spec.num_positions, banned, first, fields.count("max_initial_timestamp_index", 50),
        fields.flag("is_multilingual", spec.vocab_size >= MULTILINGUAL), _read_heads(config, spec),
    )


def _read_heads(config: dict[str, Any], spec: WhisperSpec) -> list[tuple[int, int]]:
    """Stated with most checkpoints; else those of the upper half, as in the code that was published with the paper, but
    no more than fit beside a step."""
    stated = config.get("alignment_heads")
    if stated is None:
        layers = range(spec.num_layers // 2, spec.num_layers)
        return [(layer, head) for layer in layers for head in range(spec.num_heads)][-MOST_HEADS:]
    pairs = [tuple(pair) if isinstance(pair, list) else () for pair in stated] if isinstance(stated, list) else []
    bounds = (spec.num_layers, spec.num_heads)
    is_right = [
        len(pair) == 2 and all(type(i) is int and 0 <= i < most for i, most in zip(pair, bounds, strict=True))
        for pair in pairs
    ]
    if not pairs or not all(is_right):
        raise ConfigError(
            f"generation_config.json: alignment_heads must be pairs of a layer below {bounds[0]} and a head below "
            f"{bounds[1]}, got {stated!r:.200}", param="alignment_heads",
        )
    return [(pair[0], pair[1]) for pair in pairs]


def _read_ids(config: dict[str, Any], name: str, spec: WhisperSpec) -> list[int]:
    """Those of the vocabulary; files also have -1 for a set that transformers once had built in."""
    found = config.get(name) or []
    if not isinstance(found, list):
        raise ConfigError(f"config.json: {name} must be a list of token ids, got {found!r:.200}", param=name)
    return [i for i in found if type(i) is int and 0 <= i < spec.vocab_size]


LAYER, OWN = "model.decoder.layers.{i}", "layers.{i}"

FAMILY = Family(
    name="whisper",
    architectures=("WhisperForConditionalGeneration",),
    read_config=read_config,
    cache_specs=cache_specs,
    names=CheckpointNames(
        {
            **audio_names("model.encoder.", "encoder."),
            "model.decoder.embed_tokens": "embedding",
            "model.decoder.embed_positions.weight": "positions",
            "model.decoder.layer_norm": "norm",
            f"{LAYER}.self_attn_layer_norm": f"{OWN}.attention_norm",
            f"{LAYER}.self_attn.q_proj": f"{OWN}.attention.qkv#q",
            f"{LAYER}.self_attn.k_proj": f"{OWN}.attention.qkv#k",
            f"{LAYER}.self_attn.v_proj": f"{OWN}.attention.qkv#v",
            f"{LAYER}.self_attn.out_proj": f"{OWN}.attention.output",
            f"{LAYER}.encoder_attn_layer_norm": f"{OWN}.cross_norm",
            f"{LAYER}.encoder_attn.q_proj": f"{OWN}.cross.query",
            f"{LAYER}.encoder_attn.k_proj": f"{OWN}.cross.key_value#k",
            f"{LAYER}.encoder_attn.v_proj": f"{OWN}.cross.key_value#v",
            f"{LAYER}.encoder_attn.out_proj": f"{OWN}.cross.output",
            f"{LAYER}.final_layer_norm": f"{OWN}.mlp_norm",
            f"{LAYER}.fc1": f"{OWN}.mlp.up",
            f"{LAYER}.fc2": f"{OWN}.mlp.down",
        },
    ),
    model="headrace.models.whisper.model:Whisper",
    media=FamilyMedia(read_media),
)
