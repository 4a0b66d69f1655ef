"""Specs of decoders with encoders. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from headrace.layers.spec import DecoderSpec, MlpSpec, NormSpec


class EncoderKind(Protocol):
    """A spec of an encoder. ``tower`` is ``"module:Class"`` of a `headrace.layers.decoder.multimodal.Tower`.
    ``num_parts``: parts of its vectors, each of the decoder's hidden size: the embedding, and what is added behind the
    decoder's first layers."""

    @property
    def tower(self) -> str: ...

    @property
    def num_parts(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class MultimodalSpec(DecoderSpec):
    """A decoder with an encoder. ``merge`` and ``tokens_per_second``: see `headrace.layers.media.grid_positions`, for
    models whose rotary embedding has sections. ``is_whole``: placeholders of an item attend to one another in both
    directions."""

    encoder: EncoderKind
    merge: int = 1
    tokens_per_second: float = 1.0
    is_whole: bool = False

    @classmethod
    def of(cls, text: DecoderSpec, encoder: EncoderKind, **special: Any) -> MultimodalSpec:
        """A text model's spec with an encoder."""
        return cls(**{each.name: getattr(text, each.name) for each in fields(text)}, encoder=encoder, **special)


@dataclass(frozen=True)
class VisionSpec:
    """A vision transformer whose norms come before the branches. ``input_size``: numbers of a patch, flat;
    ``patch_bias``: its projection has one. ``qkv_bias`` and ``output_bias`` are those of attention. ``qk_norm``: RMS
    norms over all heads of q and k. ``has_scales``: each branch's output is multiplied by a vector."""

    hidden_size: int
    num_layers: int
    num_heads: int
    input_size: int
    mlp: MlpSpec
    norm: NormSpec
    patch_bias: bool = True
    qkv_bias: bool = True
    output_bias: bool = True
    qk_norm: bool = False
    has_scales: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class SizedImageSpec:
    """A vision transformer over images of any size, as Pixtral is: no learned positions, but rotary ones of rows and
    columns with base ``theta``."""

    vision: VisionSpec
    patch_size: int
    theta: float


@dataclass(frozen=True)
class ImageSpec:
    """A vision transformer over images of one size, as CLIP and SigLIP have it. ``has_class_token``: a token of its own
    comes before the patches. ``first_norm`` is applied to the embeddings, ``last_norm`` behind the last layer."""

    vision: VisionSpec
    image_size: int
    patch_size: int
    has_class_token: bool = False
    first_norm: bool = False
    last_norm: bool = True

    @property
    def side(self) -> int:
        """Patches of a row, and rows."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class DualSpec:
    """An encoder of texts and one of images whose embeddings, of ``hidden_size`` elements, are compared. ``num_words``
    and ``num_positions`` are those of texts, which attend to the left alone if ``is_causal``, and are padded to
    ``num_positions`` with ``pad_id`` if there is one. ``pools_by_attention``: a learned query attends to the patches;
    else the class token is the image. ``projection_bias``: of the text's projection; images then have none."""

    text: VisionSpec
    image: ImageSpec
    hidden_size: int
    num_words: int
    num_positions: int
    is_causal: bool = False
    pad_id: int | None = None
    pools_by_attention: bool = False
    projection_bias: bool = False

    @property
    def num_layers(self) -> int:
        return self.text.num_layers

    @property
    def vocab_size(self) -> int:
        """Words, and the placeholder of an image, which is the last."""
        return self.num_words + 1

    @property
    def max_model_len(self) -> int:
        return self.num_positions


@dataclass(frozen=True)
class AudioSpec:
    """Whisper's encoder: two convolutions over ``num_mels`` bands of each frame, the second of which takes every other
    frame, learned positions, and ``blocks``."""

    blocks: VisionSpec
    num_mels: int
    num_positions: int

    @property
    def num_frames(self) -> int:
        """Frames of the window that it hears."""
        return 2 * self.num_positions
