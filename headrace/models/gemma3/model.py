"""Gemma 3's checkpoint names: norms on both sides of each branch; text beside images in the larger models' files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from headrace.layers.decoder.decoder import Decoder
from headrace.layers.decoder.names import SPLIT_NAMES

OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
OF_TEXT = {"language_model.": "", "model.language_model.": "model."}
"""Prefixes of the multimodal files, older and newer: what stands there instead in those of text alone."""


class Gemma3Model(Decoder):
    """The decoder with two kinds of layers, which the spec asks for."""

    names: ClassVar[dict[str, str]] = {
        **SPLIT_NAMES,
        "model.layers.{i}.post_attention_layernorm": "layers.{i}.attention_post_norm",
        "model.layers.{i}.pre_feedforward_layernorm": "layers.{i}.mlp_norm",
        "model.layers.{i}.post_feedforward_layernorm": "layers.{i}.mlp_post_norm",
    }

    def translate(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors of text, without the prefixes they have beside those of images."""
        for name, tensor in tensors:
            if not name.startswith(OF_IMAGES):
                prefix = next((prefix for prefix in OF_TEXT if name.startswith(prefix)), "")
                yield OF_TEXT.get(prefix, "") + name.removeprefix(prefix), tensor
