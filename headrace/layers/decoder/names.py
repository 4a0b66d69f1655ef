"""Checkpoint names that most decoders share, and ways to make a family's own table from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

SPLIT_NAMES = {
    "model.embed_tokens": "embedding",
    "model.norm": "norm",
    "lm_head": "head",
    "model.layers.{i}.self_attn.q_proj": "layers.{i}.attention.qkv#q",
    "model.layers.{i}.self_attn.k_proj": "layers.{i}.attention.qkv#k",
    "model.layers.{i}.self_attn.v_proj": "layers.{i}.attention.qkv#v",
    "model.layers.{i}.self_attn.o_proj": "layers.{i}.attention.output",
    "model.layers.{i}.self_attn.q_norm": "layers.{i}.attention.q_norm",
    "model.layers.{i}.self_attn.k_norm": "layers.{i}.attention.k_norm",
    "model.layers.{i}.mlp.gate_proj": "layers.{i}.mlp.gate_up#gate",
    "model.layers.{i}.mlp.up_proj": "layers.{i}.mlp.gate_up#up",
    "model.layers.{i}.mlp.down_proj": "layers.{i}.mlp.down",
    "model.layers.{i}.input_layernorm": "layers.{i}.attention_norm",
    "model.layers.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
}
"""q, k, v and gate, up are separate tensors; norms stand before the branches."""

SCORE_NAMES = {"score": "scores"}
"""The head of a decoder that classifies."""

BARE_PREFIXES = ("model.", "lm_head.")

EXPERT_NAMES = {
    "model.layers.{i}.mlp.experts.{x}.gate_proj": "layers.{i}.mlp.experts.gate_up#{x}/gate",
    "model.layers.{i}.mlp.experts.{x}.up_proj": "layers.{i}.mlp.experts.gate_up#{x}/up",
    "model.layers.{i}.mlp.experts.{x}.down_proj": "layers.{i}.mlp.experts.down#{x}/down",
}
"""To be added to a table: a tensor per expert and matrix (see `headrace.layers.moe.checkpoint`)."""

ROUTER = "layers.{i}.mlp.router.logits"
"""Our name of what chooses experts; checkpoints have several."""


def add_prefix(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint that holds the bare decoder, under the names they have beside a head."""
    for name, tensor in tensors:
        yield name if name.startswith(BARE_PREFIXES) else f"model.{name}", tensor


def with_stacked_mlp(names: dict[str, str]) -> dict[str, str]:
    """The table for a checkpoint that stores gate and up as one tensor, gate first."""
    kept = {theirs: ours for theirs, ours in names.items() if "gate_up" not in ours}
    return {**kept, "model.layers.{i}.mlp.gate_up_proj": "layers.{i}.mlp.gate_up"}


def with_stacked_qkv(names: dict[str, str]) -> dict[str, str]:
    """The table for a checkpoint that stores q, k and v as one tensor, in that order."""
    kept = {theirs: ours for theirs, ours in names.items() if "attention.qkv" not in ours}
    return {**kept, "model.layers.{i}.self_attn.qkv_proj": "layers.{i}.attention.qkv"}
