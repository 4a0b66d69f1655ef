"""Scales that checkpoints state for keys and values in 8-bit floats.

Pages hold numbers without scales. Instead, a scale becomes part of the weights: those of keys and values are divided by
it, those of queries and of the output multiplied. It is rounded up to a power of two, so that this changes no number
but what pages hold, and costs nothing per step.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.layers.linear import Linear
from headrace.layers.quantization.storage import plain_weight
from headrace.layers.self_attention import Attention, AttentionLayer

logger = logging.getLogger(__name__)

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
KINDS = {"k_scale": "k", "v_scale": "v", "kv_scale": "kv"}
"""Of a layer's attention or its ``k_proj`` and ``v_proj``."""
OUTPUTS = {"k_proj": "k", "v_proj": "v"}
"""Modules whose ``output_scale`` is one of keys or values."""


def find_scale(name: str) -> tuple[int, str] | None:
    """The layer of a tensor, and of what it is the scale: ``k``, ``v`` or ``kv``; None for other tensors."""
    module, _, kind = name.rpartition(".")
    of = OUTPUTS.get(module.rpartition(".")[2]) if kind == "output_scale" else KINDS.get(kind)
    layer = LAYER.search(name)
    return None if of is None or layer is None else (int(layer.group(1)), of)


class CacheScales:
    """The scales of one checkpoint: of several of a layer, such as those of heads, the largest."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], float] = {}

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Remember the scales among checkpoint tensors, and yield the others."""
        for name, tensor in tensors:
            found = find_scale(name)
            if found is None:
                yield name, tensor
                continue
            scale = float(tensor.float().amax())
            if math.isfinite(scale) and scale > 0:  # writers state -1 for none
                for of in found[1]:
                    key = found[0], of
                    self._found[key] = max(self._found.get(key, 0.0), scale)

    def apply(self, layers: Mapping[int, AttentionLayer]) -> None:
        """Make the scales part of the weights of these layers, by number; once they are filled."""
        left = 0
        for number, layer in layers.items():
            keys, values = (2.0 ** math.ceil(math.log2(self._found.get((number, of), 1.0))) for of in "kv")
            if (keys, values) != (1.0, 1.0):
                left += not (isinstance(layer, Attention) and _scale(layer, keys, values))
        if left:
            logger.warning("scales of keys and values of %d layers are left out: their weights cannot hold them", left)


@torch.no_grad()
def _scale(layer: Attention, keys: float, values: float) -> bool:
    """Divide what a layer's pages hold by ``keys`` and ``values``; False where the weights cannot hold that."""
    parts = {"v": 1 / values}
    norms = [(layer.q_norm, keys), (layer.k_norm, 1 / keys)]
    if layer.q_norm is None or layer.k_norm is None:
        parts, norms = {**parts, "q": keys, "k": 1 / keys}, []
    if any(norm is not None and norm.offset for norm, _ in norms):
        return False  # the norm adds to its weight
    rows = [(layer.qkv.rows[name], factor) for name, factor in parts.items()]
    owned = [(layer.qkv, rows), (layer.output, [(slice(None), values)])]
    tables = [_scale_tables(linear, own) for linear, own in owned]
    if any(linear.stored is not None and table is None for (linear, _), table in zip(owned, tables, strict=True)):
        return False
    for norm, factor in norms:
        if norm is not None:
            norm.weight.mul_(factor)
    for (linear, own), table in zip(owned, tables, strict=True):
        if isinstance(linear.stored, CodedWeight) and table is not None:
            linear.stored.weight = replace(linear.stored.weight, scales=table)
        else:
            _multiply(plain_weight(linear), own)
    _multiply(layer.qkv.bias, rows)
    return True


def _multiply(tensor: torch.Tensor | None, rows: list[tuple[slice, float]]) -> None:
    """Multiply some rows in place, if there is a tensor."""
    if tensor is not None:
        for part, factor in rows:
            tensor[part].mul_(factor)


def _scale_tables(linear: Linear, rows: list[tuple[slice, float]]) -> torch.Tensor | None:
    """Scales of a weight in codes, times a power of two for some outputs; None for other weights, and where the scales
    cannot hold it."""
    if not isinstance(linear.stored, CodedWeight):
        return None
    weight: DeviceCodes = linear.stored.weight.untile()
    scales = weight.scales.clone()
    for part, factor in rows:
        start, stop, _ = part.indices(weight.out_features)
        if start % weight.rows or (stop % weight.rows and stop != weight.out_features):
            return None
        own = scales[start // weight.rows : -(-stop // weight.rows)]
        if weight.has_powers:
            exponents = own.int() + int(math.log2(factor))
            if bool(((exponents < 127) | (exponents > 254))[own > 0].any()):
                return None
            own.copy_(torch.where(own > 0, exponents, 0).to(torch.uint8))
        elif weight.has_pairs:
            halves = own.view(torch.float16)[:, ::2]
            scaled = halves * factor
            if not torch.equal(scaled / factor, halves):
                return None
            halves.copy_(scaled)
        else:
            own.mul_(factor)
    return replace(weight, scales=scales).tile().scales if linear.stored.weight.is_tiled else scales
