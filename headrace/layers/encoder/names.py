"""Checkpoint names that encoders share, and what else their files hold."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import torch

PLAIN_NAMES = {
    "embeddings.word_embeddings.weight": "embedding.words",
    "embeddings.position_embeddings.weight": "embedding.positions",
    "embeddings.token_type_embeddings.weight": "embedding.kinds",
    "embeddings.LayerNorm": "embedding.norm",
    "encoder.layer.{i}.attention.self.query": "layers.{i}.qkv#q",
    "encoder.layer.{i}.attention.self.key": "layers.{i}.qkv#k",
    "encoder.layer.{i}.attention.self.value": "layers.{i}.qkv#v",
    "encoder.layer.{i}.attention.output.dense": "layers.{i}.output",
    "encoder.layer.{i}.attention.output.LayerNorm": "layers.{i}.attention_norm",
    "encoder.layer.{i}.intermediate.dense": "layers.{i}.mlp.up",
    "encoder.layer.{i}.output.dense": "layers.{i}.mlp.down",
    "encoder.layer.{i}.output.LayerNorm": "layers.{i}.mlp_norm",
}

SCORE_NAMES = {"pooler.dense": "scores.dense", "classifier": "scores.output"}
"""The classifier: its dense layer belongs to the encoder, as in the first of these models."""

SCORE_HEAD_NAMES = {"classifier.dense": "scores.dense", "classifier.out_proj": "scores.output"}
"""The classifier as a head of its own."""

HARMLESS = ("embeddings.position_ids",)
"""Name endings of tensors that old checkpoints carry and nobody needs."""

HEADS = ("cls.", "lm_head.", "pooler.")
"""Prefixes of heads for training; dropped where the served model has no place for them."""

OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def strip_prefixes(
    tensors: Iterable[tuple[str, torch.Tensor]], prefixes: tuple[str, ...], *, wanted: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under the names of a bare encoder, without heads that are not ``wanted``."""
    for name, tensor in tensors:
        bare = name.removeprefix(next((p for p in prefixes if name.startswith(p)), ""))
        for old, new in OLD_ENDINGS.items():
            if bare.endswith(old):
                bare = bare.removesuffix(old) + new
        if bare in wanted or not bare.startswith(HEADS):
            yield bare, tensor
