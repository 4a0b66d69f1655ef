"""Blocks that no family here has, against transformers: parallel branches with one norm or two, a bias of the head; and
a layer whose attention is of an out-of-tree type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import harness
import pytest
import torch
from family_cases import config_json, make_oracle, prompt
from test_parity import TOLERANCE, oracle_logits, prefill_in_chunks

from headrace.base.cache import CacheSpec
from headrace.layers.attention.contract import AttentionParams
from headrace.layers.build import Build
from headrace.layers.decoder.block import DecoderBlock, ParallelBlock
from headrace.layers.decoder.decoder import Decoder
from headrace.layers.names import UNGATED_NAMES, CheckpointNames
from headrace.layers.self_attention import Attention, AttentionLayer
from headrace.layers.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    VocabularySpec,
    decoder_cache_specs,
)
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    read_attention,
    read_decoder,
    read_layers,
    read_mlp,
    read_rope,
    read_vocabulary,
)
from headrace.models.family import Family

Tensors = Iterator[tuple[str, torch.Tensor]]


def read_phi(config: dict[str, Any]) -> DecoderSpec:
    fields = Fields(config)
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, partial=0.5)), block="parallel_one_norm",
        attention=read_attention(fields, qkv_bias=True, output_bias=True),
        mlp=read_mlp(fields, default="gelu_new", bias=True, gated=False),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        vocabulary=read_vocabulary(fields, head_bias=True),
    )


PHI = Family("phi", (), read_phi, names=CheckpointNames(UNGATED_NAMES, renames={
    "model.final_layernorm.": "model.norm.", ".self_attn.dense.": ".self_attn.o_proj.", ".fc1.": ".up_proj.",
    ".fc2.": ".down_proj.",
}))


def read_neox(config: dict[str, Any]) -> DecoderSpec:
    fields = Fields({**config, "num_key_value_heads": None})
    return read_decoder(
        fields, read_layers(fields, read_rope(fields, partial=0.25)),
        block="parallel" if fields.flag("use_parallel_residual", True) else "sequential",
        attention=read_attention(fields, qkv_bias=True, output_bias=True),
        mlp=read_mlp(fields, default="gelu", bias=True, gated=False),
        norm=NormSpec(fields.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
    )


NEOX = Family("neox", (), read_neox, names=CheckpointNames({
    "gpt_neox.embed_in": "embedding",
    "gpt_neox.final_layer_norm": "norm",
    "lm_head": "head",
    "gpt_neox.layers.{i}.attention.query_key_value": "layers.{i}.attention.qkv",
    "gpt_neox.layers.{i}.attention.dense": "layers.{i}.attention.output",
    "gpt_neox.layers.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.up",
    "gpt_neox.layers.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down",
    "gpt_neox.layers.{i}.input_layernorm": "layers.{i}.attention_norm",
    "gpt_neox.layers.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
}))


def order_heads(tensors: dict[str, torch.Tensor], num_heads: int) -> dict[str, torch.Tensor]:
    """GPT-NeoX stacks q, k and v head by head, [H, 3, E, ...]; here all of q come first."""
    return {
        name: t.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2) if "query_key_value" in name else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize(("family", "kind", "options"), [
    (PHI, "Phi", {"num_key_value_heads": 4}),
    (NEOX, "GPTNeoX", {"rotary_pct": 0.5}),
    (NEOX, "GPTNeoX", {"use_parallel_residual": False, "rotary_pct": 0.5}),
])
def test_logits(family: Family, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    model = make_oracle(kind, options)
    monkeypatch.setattr(harness, "find_family", lambda architecture: family)
    tensors = order_heads(model.state_dict(), model.config.num_attention_heads)
    built = harness.build_harness(config_json(model), tensors, num_sequences=5)
    is_parallel = family is PHI or options.get("use_parallel_residual", True)
    assert isinstance(built.model.layers[0], ParallelBlock if is_parallel else DecoderBlock)
    tokens = prompt(0)
    expected = oracle_logits(model, tokens)
    for chunk in (len(tokens), 5, 1):
        torch.testing.assert_close(prefill_in_chunks(built, tokens, chunk)[1], expected, **TOLERANCE)
    first, second = built.start(), built.start()
    last, none = built.step((first, tokens), (second, tokens[:9]), wanted=[0])
    torch.testing.assert_close(last, expected[-1:], **TOLERANCE)
    assert len(none) == 0


@dataclass(frozen=True)
class SumSpec:
    """Adds up all tokens of the step; keeps nothing."""

    branch: ClassVar[str] = f"{__name__}:SumAttention"

    def cache_spec(self, layer: LayerSpec, kv_dtype: str) -> CacheSpec | None:
        return None


class SumAttention(AttentionLayer):
    def __init__(self, spec: SumSpec, layer: LayerSpec, *, build: Build, **more: Any):
        super().__init__(1, AttentionParams(1.0), build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, keepdim=True) * self.step.batch.positions[:, None]


def test_a_layer_has_attention_of_its_own():
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
    layers = (LayerSpec(0, None, attention=SumSpec()), LayerSpec(4, None))
    spec = DecoderSpec(
        16, 64, VocabularySpec(11, tied=True), attention, MlpSpec(8, "relu", gated=False), NormSpec(1e-6), layers
    )
    model = Decoder(spec, CheckpointNames(), Build(torch.device("cpu"), torch.float32))
    assert [type(layer.attention) for layer in model.layers] == [SumAttention, Attention]
    assert [s and s.kind for s in decoder_cache_specs(spec, "float32")] == [None, "sliding_window"]
