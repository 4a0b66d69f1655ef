"""Schemes that quantise plain weights to 8 or 4 bits on a CPU after loading, one weight at a time, so that at most one
exists in both forms."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from headrace.kernels import native
from headrace.kernels.packed_linear.forms import PanelWeight
from headrace.kernels.packed_linear.layout import PackedMatrix, unpack
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8, quantise_int8_groups
from headrace.layers.quantization.contract import Named, SchemeQuery
from headrace.layers.quantization.storage import BUILD_WAIT_S, StorableWeight, find_storable

logger = logging.getLogger(__name__)

LEAST_OUTPUTS = 64
"""A weight with fewer outputs keeps its precision: it is too small to gain anything."""


class _QuantisedAtLoad:
    """Base of the schemes here: checkpoint tensors pass unchanged."""

    def __init__(self, query: SchemeQuery):
        self._query = query

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """See `Scheme`."""
        return tensors


class Int8(_QuantisedAtLoad):
    """8-bit weights with a scale per 32 inputs; activations are rounded to 8 bits with a scale per 32, too."""

    def finish(self, model: nn.Module) -> None:
        """See `Scheme`."""
        quantise_weights(model, lambda weight: quantise_int8_groups(weight.weight))


class Int4(_QuantisedAtLoad):
    """4-bit weights with a scale and a min per 32 inputs, activations as in `Int8`. Embedding and head have 8 bits:
    rounding costs most accuracy there."""

    def finish(self, model: nn.Module) -> None:
        """See `Scheme`."""
        quantise_weights(
            model,
            lambda weight: quantise_int8_groups(weight.weight) if weight.is_vocabulary else quantise_int4(weight.weight)
        )


class W8A8(_QuantisedAtLoad):
    """8-bit weights with a scale per output, activations rounded to 8 bits with a scale per token: the fastest prefill
    on AMX, and the least accurate, as a token's largest activation sets the rounding step of all of them. Embedding and
    head as in `Int8`."""

    def finish(self, model: nn.Module) -> None:
        """See `Scheme`."""
        quantise_weights(
            model, lambda weight: (quantise_int8_groups if weight.is_vocabulary else quantise_int8)(weight.weight)
        )


@torch.no_grad()
def quantise_weights(model: nn.Module, quantise: Callable[[StorableWeight], PackedMatrix]) -> None:
    """Quantise every weight of at least `LEAST_OUTPUTS` outputs. Only the native library has kernels for these; without
    it the rounded values are written back to the plain parameters, at the size and speed of plain weights."""
    began = time.monotonic()
    is_native = native.build(timeout=BUILD_WAIT_S).status == "ready"
    if not is_native:
        logger.warning(
            "quantised weights take as much memory as plain ones here: there are no native CPU kernels (headrace check "
            "says why)"
        )
    before = after = 0
    for weight in find_storable(model):
        if weight.weight.shape[0] < LEAST_OUTPUTS:
            continue
        packed = quantise(weight)
        before, after = before + weight.weight.nbytes, after + packed.num_bytes
        if is_native:
            weight.store(PanelWeight(packed))
        else:
            weight.weight.copy_(unpack(packed, weight.weight.dtype))
    # matrices that are still plain parameters; norms and biases have one dim
    plain = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1) if is_native else 0
    if plain > before:
        logger.warning(
            "%.0f MB of weights stay plain: packed layout does not support their shapes", plain / 1e6
        )
    logger.info(
        "weights quantised in %.1f s: %.0f MB are now %.0f MB", time.monotonic() - began, before / 1e6, after / 1e6
    )
