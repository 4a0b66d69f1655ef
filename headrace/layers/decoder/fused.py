"""Decides from the modules of a decoder whether one native CPU kernel can run all its layers, and describes their
weights and pages to that kernel.

Knows no families. Anything the kernel does not compute exactly raises `NotFusable`; layers are then called one after
the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from headrace.kernels.decoder_layers import MOST_TOKENS
from headrace.kernels.decoder_layers.parts import (
    EndParts,
    Heads,
    LayerParts,
    Mixture,
    Mlp,
    Norms,
    Pages,
    Product,
    Rotation,
)
from headrace.kernels.decoder_layers.table import FusedDecode, LayerTable
from headrace.kernels.lora import LowRankBank
from headrace.kernels.lora.codes import CodedBank
from headrace.kernels.native import NATIVE
from headrace.kernels.packed_linear.forms import PanelWeight
from headrace.kernels.packed_linear.layout import PANEL, pack_floats
from headrace.kernels.rowwise import Gate
from headrace.layers.batch import ForwardBatch
from headrace.layers.decoder.block import DecoderBlock
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMlp
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.moe.weights import StackedLinear
from headrace.layers.norm import NoNorm, RmsNorm
from headrace.layers.residual import Residual
from headrace.layers.self_attention import Attention
from headrace.layers.vocabulary import Embedding, Head

logger = logging.getLogger(__name__)


class NotFusable(Exception):
    """A layer is, or has, something that the kernel does not compute; the message says what."""


def fuse_layers(layers: Iterable[Any]) -> LayerTable | None:
    """The table by which one kernel runs all layers; weights must be packed and pages bound. None if the layers must be
    called one after the other."""
    try:
        return LayerTable([describe_layer(layer) for layer in layers])
    except NotFusable as reason:
        logger.debug("layers are called one after the other: %s", reason)
        return None


def run_layers(table: LayerTable, x: torch.Tensor, batch: ForwardBatch) -> Residual | None:
    """The residual after all layers, from the embedded tokens ``x`` [T, D], which is overwritten; [S, D] if S tokens
    are wanted. None, with ``x`` unchanged, if the kernel does not take this step: more than `MOST_TOKENS` tokens, an
    attention backend that it cannot replace, or media."""
    # query_start, kv_lens and the number of tokens are equal in all groups; slots and page tables are not
    first = batch.groups[0].inputs if batch.groups else None
    if first is None or not 0 < first.num_tokens <= MOST_TOKENS:
        return None
    if not all(group.backend.fuses_layers for group in batch.groups):
        return None
    if batch.rotations is not None or batch.media is not None:
        return None
    if batch.adapters is not None and (table.banks is None or not batch.adapters.segments):
        return None
    # the kernel takes raw addresses: the batch keeps these tensors alive during the call
    groups = [(group.inputs.slots, group.inputs.page_table) for group in batch.groups]
    wanted: tuple[torch.Tensor, ...] = ()
    if batch.wanted is not None:
        alone = batch.wanted.inputs[table.last_group]
        wanted = (batch.wanted.indices, alone.query_start, alone.kv_lens, alone.page_table)
    positions = batch.positions if batch.rope_positions is None else batch.rope_positions
    adapter_rows = None if batch.adapters is None else batch.adapters.pairs
    lengths = first.query_start, first.kv_lens
    out = table.run(x, positions, groups, lengths, wanted, adapter_rows=adapter_rows)
    return None if out is None else Residual(stream=out[1], pending=out[0])


def fuse_step(table: LayerTable, model: Any) -> FusedDecode | None:
    """A decode step from token ids to sampled tokens in one call; None where the embedding, the norm or the head are of
    another kind, or while the native library is being compiled."""
    if NATIVE.find() is None:
        return None
    try:
        return FusedDecode(table, _describe_ends(model))
    except NotFusable as reason:
        logger.debug("embedding and head are called apart from the layers: %s", reason)
        return None


def _describe_ends(model: Any) -> EndParts:
    embedding, norm, head = model.embedding, model.norm, model.head
    _require(
        type(embedding) is Embedding and isinstance(embedding.stored, PanelWeight), "an embedding that is not packed"
    )
    _require(type(norm) is RmsNorm, "no RMS norm after the layers")
    _require(
        type(head) is Head and isinstance(head.stored, PanelWeight)
        and head.bias is None and head.divisor == 1.0 and head.softcap == 0.0,
        "a head of another kind"
    )
    return EndParts(
        embedding.stored.matrix, embedding.scale, norm.weight.data, norm.eps, norm.offset, head.stored.matrix,
        embedding.dtype
    )


def describe_layer(layer: Any) -> LayerParts:
    """The parts of one layer; raises `NotFusable`."""
    _require(type(layer) is DecoderBlock and layer.residual_scale == 1.0, "a block of another kind")
    attention, mlp = layer.attention, layer.mlp
    # exact types: a subclass may compute something else
    _require(type(attention) is Attention, "attention of another kind")
    _require(type(mlp) in (GatedMlp, MoeMlp), "an MLP of another kind")
    norms, qkv, output = _describe_norms(layer), _describe_product(attention.qkv), _describe_product(attention.output)
    parts = _describe_mixture(mlp) if isinstance(mlp, MoeMlp) else _describe_mlp(mlp)
    return LayerParts(
        norms, qkv, output, parts, _describe_heads(attention), _describe_rotation(attention, norms),
        _describe_pages(attention), _describe_banks(attention, mlp)
    )


def _describe_banks(attention: Attention, mlp: GatedMlp | MoeMlp) -> tuple[LowRankBank | CodedBank, ...]:
    """Empty where no adapters are served, or the kernel does not add what they have."""
    if isinstance(mlp, MoeMlp):
        return ()
    banks = [linear.lora for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
    return tuple(bank.tensors for bank in banks if bank is not None)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotFusable(reason)


def _describe_norms(layer: DecoderBlock) -> Norms:
    attention, mlp = layer.attention_norm, layer.mlp_norm
    if not isinstance(attention, RmsNorm) or not isinstance(mlp, RmsNorm):
        raise NotFusable("no RMS norm before a branch")
    posts: list[torch.Tensor | None] = []
    for norm in (layer.attention_post_norm, layer.mlp_post_norm):
        _require(isinstance(norm, RmsNorm | NoNorm), "a norm of another kind")
        _require(isinstance(norm, NoNorm) or _is_alike(norm, attention), "norms that differ")
        posts.append(norm.weight.data if isinstance(norm, RmsNorm) else None)
    _require(_is_alike(mlp, attention), "norms that differ")
    return Norms(attention.weight.data, mlp.weight.data, posts[0], posts[1], attention.eps, attention.offset)


def _is_alike(norm: object, other: RmsNorm | Norms) -> bool:
    return isinstance(norm, RmsNorm) and (norm.eps, norm.offset) == (other.eps, other.offset)


def _describe_product(linear: Linear) -> Product:
    if type(linear) is not Linear or not isinstance(linear.stored, PanelWeight):
        raise NotFusable("a weight that is not packed")
    _require(linear.group is None, "a product that several ranks add up")
    return Product(linear.stored.matrix, _data(linear.bias))


def _data(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.data


def _describe_mlp(mlp: GatedMlp) -> Mlp:
    _require(bool(mlp.activation), "a clamped activation outside of a mixture")
    return Mlp(_describe_product(mlp.gate_up), _describe_product(mlp.down), Gate(mlp.activation))


def _describe_mixture(mixture: MoeMlp) -> Mixture:
    experts, router = mixture.experts, mixture.router
    _require(mixture.shared is None, "an MLP beside the experts")
    _require(not mixture.is_divided, "experts that several ranks have")
    logits = Product(pack_floats(router.logits.weight.data), _data(router.logits.bias))
    stacks = Mlp(_describe_stack(experts.gate_up), _describe_stack(experts.down), mixture.gate)
    return Mixture(stacks, logits, _data(router.choice_bias), router.shape)


def _describe_stack(stack: StackedLinear) -> Product:
    if not isinstance(stack.stored, PanelWeight):
        raise NotFusable("experts that are not packed")
    # the kernel addresses an expert by its first panel, so no panel may span two experts
    rows_of_whole_panels = PANEL * stack.num_stacked
    _require(stack.stored.matrix.out_features % rows_of_whole_panels == 0, "experts without whole panels each")
    return Product(stack.stored.matrix, _data(stack.bias))


def _describe_heads(attention: Attention) -> Heads:
    spec, params = attention.spec, attention.params
    sinks = None if params.sinks is None else params.sinks.data.float().contiguous()
    return Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, params.scale, params.softcap, params.window, sinks)


def _describe_rotation(attention: Attention, norms: Norms) -> Rotation:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    q_weight = k_weight = None
    if q_norm is not None and k_norm is not None:
        _require(
            attention.spec.qk_norm == "head" and _is_alike(q_norm, norms) and _is_alike(k_norm, norms),
            "norms other than of each head before rotation",
        )
        q_weight, k_weight = q_norm.weight.data, k_norm.weight.data
    rotary, rope = attention.rotary, attention.rope
    if rotary is None or rope is None:
        return Rotation(None, 0, False, q_weight, k_weight)
    _require(rotary.query_scale is None, "queries that are scaled by their positions")
    return Rotation(rotary.cos_sin, rope.rotary_dim, rope.interleaved, q_weight, k_weight)


def _describe_pages(attention: Attention) -> Pages:
    pages = attention.pages
    if pages is None:
        raise NotFusable("no pages yet")
    page_size = pages.k.shape[1]
    _require(
        pages.k.is_contiguous() and pages.v.is_contiguous() and pages.k.shape == pages.v.shape,
        "pages of another layout"
    )
    # page numbers are found by shifts: the page size must be a power of two
    _require(pages.k.device.type == "cpu" and page_size & (page_size - 1) == 0, "pages elsewhere, or of odd size")
    return Pages(pages.k, pages.v, attention.group, pages.scales)
