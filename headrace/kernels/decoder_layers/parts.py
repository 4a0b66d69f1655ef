"""The parts of a decoder layer as the fused kernel takes them: tensors and numbers, no modules.

D hidden size, H heads, K kv heads, E head dim, F intermediate size, P pages, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.lora import LowRankBank
from headrace.kernels.lora.codes import CodedBank
from headrace.kernels.moe import RouteShape
from headrace.kernels.packed_linear.layout import PackedMatrix
from headrace.kernels.rowwise import Gate


@dataclass(frozen=True)
class Product:
    """``x @ weight.T + bias``: ``weight`` [O, I] packed, ``bias`` [O]."""

    weight: PackedMatrix
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Mlp:
    """``down(gate(gate_up(x)))``: ``gate_up`` [2F, D] with the gate's rows first, ``down`` [D, F]."""

    gate_up: Product
    down: Product
    gate: Gate


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: ``experts`` stacked along outputs, ``gate_up`` [X * 2F, D] and ``down`` [X * D, F].
    ``router`` [X, D] makes the logits of `ROUTE`, whose ``choice_bias`` [X] float32 and constants ``shape`` follow."""

    experts: Mlp
    router: Product
    choice_bias: torch.Tensor | None
    shape: RouteShape


@dataclass(frozen=True)
class Norms:
    """Weights [D] of the RMS norms before each branch and, if not None, after it. ``eps`` and ``offset``, see
    `RMS_NORM`, also apply to the q and k norms."""

    attention: torch.Tensor
    mlp: torch.Tensor
    attention_post: torch.Tensor | None
    mlp_post: torch.Tensor | None
    eps: float
    offset: float


@dataclass(frozen=True)
class Heads:
    """The heads of attention and its constants, as in `headrace.layers.attention.contract`; ``window`` and ``softcap``
    0 for none, ``sinks`` [H] float32."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int
    sinks: torch.Tensor | None


@dataclass(frozen=True)
class Rotation:
    """Between qkv and attention, see `ROPE_WRITE`: ``cos_sin`` [L, rotary_dim] float32 of L positions, None for no
    rotation; norm weights ``q_norm`` and ``k_norm`` [E], both or none."""

    cos_sin: torch.Tensor | None
    rotary_dim: int
    interleaved: bool
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True)
class Pages:
    """A layer's KV pages ``k`` and ``v`` [P, page_size, K, E], contiguous, in cache group ``group``, which is an index
    into the page tables of a step; int8 pages also have ``scales`` [P, 2, K, page_size] float32."""

    k: torch.Tensor
    v: torch.Tensor
    group: int
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerParts:
    """One layer: ``x += attention(norm(x)); x += mlp(norm(x))``, branches normalised again where `Norms` has weights
    for it."""

    norms: Norms
    qkv: Product
    """[(H + 2K) * E, D]"""
    output: Product
    """[D, H * E]"""
    mlp: Mlp | Mixture
    heads: Heads
    rotation: Rotation
    pages: Pages
    banks: tuple[LowRankBank | CodedBank, ...] = ()
    """What adapters add to qkv, output, gate_up and down; empty where none are served."""


@dataclass(frozen=True)
class EndParts:
    """Before the layers: rows of ``embedding`` [V, D] times ``embedding_scale``, rounded to ``dtype``, the dtype of
    hidden states. After them: an RMS norm by ``norm`` [D], then ``head`` [V, D]."""

    embedding: PackedMatrix
    embedding_scale: float
    norm: torch.Tensor
    eps: float
    offset: float
    head: PackedMatrix
    dtype: torch.dtype
