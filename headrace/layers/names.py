"""How checkpoints name a model's tensors: `CheckpointNames`, and the tables that families share. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

T = TypeVar("T")

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
"""Most decoders: q, k, v and gate, up are separate tensors; norms are applied before the branches."""

UNGATED_NAMES = {**SPLIT_NAMES, "model.layers.{i}.mlp.up_proj": "layers.{i}.mlp.up"}
"""The same where the MLP has no gate."""

SCORE_NAMES = {"score": "scores"}
"""The head of a decoder that classifies."""

EXPERT_NAMES = {
    "model.layers.{i}.mlp.experts.{x}.gate_proj": "layers.{i}.mlp.experts.gate_up#{x}/gate",
    "model.layers.{i}.mlp.experts.{x}.up_proj": "layers.{i}.mlp.experts.gate_up#{x}/up",
    "model.layers.{i}.mlp.experts.{x}.down_proj": "layers.{i}.mlp.experts.down#{x}/down",
}
"""To be added to a table: one tensor per expert and matrix. Checkpoints with stacked experts are split into these names
before the table is used (`headrace.layers.moe.checkpoint`)."""

ROUTER = "layers.{i}.mlp.router.logits"
"""The router's module; checkpoints name it differently."""

SHARED_EXPERT_NAMES = {
    "model.layers.{i}.mlp.gate": ROUTER,
    "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.router.choice_bias",
    "model.layers.{i}.mlp.shared_experts.gate_proj": "layers.{i}.mlp.shared.gate_up#gate",
    "model.layers.{i}.mlp.shared_experts.up_proj": "layers.{i}.mlp.shared.gate_up#up",
    "model.layers.{i}.mlp.shared_experts.down_proj": "layers.{i}.mlp.shared.down",
}
"""To be added to a table: the router with a bias on its choice, and the MLP of all tokens, as DeepSeek-V3 has them."""

LATENT_NAMES = {
    **{theirs: ours for theirs, ours in SPLIT_NAMES.items() if "self_attn" not in theirs},
    **EXPERT_NAMES,
    **SHARED_EXPERT_NAMES,
    "model.layers.{i}.self_attn.q_proj": "layers.{i}.attention.down#q",
    "model.layers.{i}.self_attn.q_a_layernorm": "layers.{i}.attention.q_norm",
    "model.layers.{i}.self_attn.q_b_proj": "layers.{i}.attention.q_up",
    "model.layers.{i}.self_attn.kv_a_proj_with_mqa": "layers.{i}.attention.down#kv",
    "model.layers.{i}.self_attn.kv_a_layernorm": "layers.{i}.attention.kv_norm",
    "model.layers.{i}.self_attn.kv_b_proj": "layers.{i}.attention.kv_up",
    "model.layers.{i}.self_attn.o_proj": "layers.{i}.attention.output",
}
"""DeepSeek's decoders: latent attention, experts beside an MLP of all tokens."""

ENCODER_NAMES = {
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
    "pooler.dense": "scores.dense",
    "classifier": "scores.output",
}
"""The BERT line; a classifier's dense layer belongs to the encoder (``pooler``), as in BERT."""

BARE_PREFIXES = ("model.", "lm_head.")
TRAINING_HEADS = ("cls.", "lm_head.", "pooler.")
"""Prefixes of the pretraining heads (masked language model, next sentence) in encoder checkpoints."""

OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class CheckpointNames:
    """``modules`` maps checkpoint module names to own ones, see `headrace.layers.loading`. Before that, each text in
    ``renames`` is replaced in tensor names, in order; tensors whose names begin with one of ``ignored`` are left out.

    ``stacked_experts``: how one tensor of all experts holds gate and up: ``gate_first`` is [X, 2F, D] with the gate's
    rows before those of up, ``transposed`` that or [X, D, 2F] with the gate's columns before those of up,
    ``alternating`` [X, D, 2F] with alternating columns. ``has_draft_layers``: layers
    numbered after the last one draft tokens, and are left out.
    """

    modules: Mapping[str, str] = field(default_factory=lambda: SPLIT_NAMES)
    renames: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    stacked_experts: Literal["gate_first", "transposed", "alternating"] = "gate_first"
    has_draft_layers: bool = False

    def leave_out(self, tensors: Iterable[tuple[str, T]], num_layers: int) -> Iterator[tuple[str, T]]:
        """The tensors that the model needs, under their checkpoint names."""
        for name, tensor in tensors:
            layer = _LAYER.match(name) if self.has_draft_layers else None
            if not name.startswith(self.ignored or ("\0",)) and (layer is None or int(layer[1]) < num_layers):
                yield name, tensor

    def rename(self, tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The tensors with ``renames`` applied, under the names that are keys of ``modules``."""
        for name, tensor in tensors:
            yield self.rename_one(name), tensor

    def rename_one(self, name: str) -> str:
        """A name with ``renames`` applied."""
        for theirs, ours in self.renames.items():  # in order, each on the result of the one before
            name = name.replace(theirs, ours)
        return name


@dataclass(frozen=True)
class GgufNaming:
    """How a family's GGUF files differ from the common naming and from its checkpoints.

    ``parts`` replaces entries of the table that decoders share (`headrace.models.weights.gguf_naming`).
    ``is_rotary_interleaved``: the converter reordered the rows of each q and k head from halves to pairs (``permute``
    in its llama class); the order is restored. ``norm_offset``: the converter added this to every norm weight; it is
    subtracted."""

    parts: Mapping[str, str] = field(default_factory=dict)
    is_rotary_interleaved: bool = False
    norm_offset: float = 0.0


def find_elsewhere(
    modules: Mapping[str, str], layers: Container[int], count: int, absent: Container[str]
) -> tuple[str, ...]:
    """Beginnings of checkpoint names, with a dot behind them, whose tensors other pipeline stages have. ``modules``:
    see `CheckpointNames`; ``layers`` of ``count`` are here, and so are all modules but those in ``absent``."""
    found = []
    for theirs, ours in modules.items():
        if ours.startswith("layers.{i}"):  # others that are numbered are an encoder's, and on all stages
            found += [theirs.partition("{i}")[0] + f"{i}." for i in range(count) if i not in layers]
        elif ours.partition(".")[0].partition("#")[0] in absent:
            found.append(f"{theirs}.")
    return tuple(dict.fromkeys(found))


def add_prefix(tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """The tensors of a checkpoint of the bare decoder, with the ``model.`` prefix that they have in one with a head."""
    for name, tensor in tensors:
        yield prefix_one(name), tensor


def prefix_one(name: str) -> str:
    """A name with that prefix."""
    return name if name.startswith(BARE_PREFIXES) else f"model.{name}"


def drop_training_heads(tensors: Iterable[tuple[str, T]], *, wanted: Container[str]) -> Iterator[tuple[str, T]]:
    """An encoder's tensors without training heads, unless named in ``wanted``; old names of norm parameters (gamma,
    beta) are replaced by the current ones."""
    for name, tensor in tensors:
        for old, new in OLD_ENDINGS.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if name in wanted or not name.startswith(TRAINING_HEADS):
            yield name, tensor


def with_stacked_mlp(names: Mapping[str, str]) -> dict[str, str]:
    """The table for a checkpoint that stores gate and up as one tensor, gate first."""
    kept = {theirs: ours for theirs, ours in names.items() if "gate_up" not in ours}
    return {**kept, "model.layers.{i}.mlp.gate_up_proj": "layers.{i}.mlp.gate_up"}


def with_stacked_qkv(names: Mapping[str, str]) -> dict[str, str]:
    """The table for a checkpoint that stores q, k and v as one tensor, in that order."""
    kept = {theirs: ours for theirs, ours in names.items() if "attention.qkv" not in ours}
    return {**kept, "model.layers.{i}.self_attn.qkv_proj": "layers.{i}.attention.qkv"}
