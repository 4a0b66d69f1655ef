"""The parts of a decoder layer as the fused kernel takes them: tensors and numbers, no modules.

D hidden size, H heads, K kv heads, E head dim, F intermediate size, P pages, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.moe import Gate, RouteShape
from headrace.kernels.packed_linear.layout import PackedMatrix


@dataclass(frozen=True)
class Product:
    """``x @ weight.T + bias``."""

    weight: PackedMatrix
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Mlp:
    """``gate_up`` [2F, D] with the gate first, ``down`` [D, F]."""

    gate_up: Product
    down: Product
    gate: Gate


@dataclass(frozen=True)
class Mixture:
    """``experts`` stacked along outputs: ``gate_up`` [X * 2F, D], ``down`` [X * D, F]. ``router`` [X, D] and
    ``choice_bias`` [X] float32 are as `ROUTE` has them."""

    experts: Mlp
    router: Product
    choice_bias: torch.Tensor | None
    shape: RouteShape


@dataclass(frozen=True)
class Norms:
    """Weights [D] of RMS norms before and, if not None, after each branch. ``eps`` and ``offset`` also apply to
    the q and k norms."""

    attention: torch.Tensor
    mlp: torch.Tensor
    attention_post: torch.Tensor | None
    mlp_post: torch.Tensor | None
    eps: float
    offset: float


@dataclass(frozen=True)
class Heads:
    """As in `headrace.layers.attention.contract`; ``sinks`` [H] float32."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int
    sinks: torch.Tensor | None


@dataclass(frozen=True)
class Rotation:
    """``cos_sin`` [L, rotary_dim] float32, None for no rotation; ``q_norm`` and ``k_norm`` [E], both or none."""

    cos_sin: torch.Tensor | None
    rotary_dim: int
    interleaved: bool
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True)
class Pages:
    """``k`` and ``v`` [P, page_size, K, E], contiguous, of cache group ``group``; of codes, ``scales`` [P, 2, K,
    page_size]."""

    k: torch.Tensor
    v: torch.Tensor
    group: int
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerParts:
    """One layer: ``x += attention(norm(x)); x += mlp(norm(x))``."""

    norms: Norms
    qkv: Product
    """[(H + 2K) * E, D]"""
    output: Product
    """[D, H * E]"""
    mlp: Mlp | Mixture
    heads: Heads
    rotation: Rotation
    pages: Pages


@dataclass(frozen=True)
class EndParts:
    """Before and after the layers: rows of ``embedding`` [V, D] times ``embedding_scale`` (rounded to
    ``dtype``, which is that of hidden states), and ``head`` [V, D] of their RMS norm by ``norm`` [D]."""

    embedding: PackedMatrix
    embedding_scale: float
    norm: torch.Tensor
    eps: float
    offset: float
    head: PackedMatrix
    dtype: torch.dtype
