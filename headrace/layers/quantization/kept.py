"""Weights made smaller as a model is loaded on a CPU, when the user wants that: 8 or 4 bits. A plain weight is let go
of before the next one is taken.
"""

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
from headrace.layers.storing import StorableWeight, find_storable

logger = logging.getLogger(__name__)

BUILD_WAIT_S = 180.0
LEAST_OUTPUTS = 64
"""A weight with fewer is too small to be worth losing anything."""


class _Kept:
    """What the schemes here share: tensors pass as they are."""

    def __init__(self, query: SchemeQuery):
        self._query = query

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """See `Scheme`."""
        return tensors


class Int8(_Kept):
    """8-bit weights; a scale per 32 of them, and one per 32 inputs, which are rounded to 8 bits."""

    def finish(self, model: nn.Module) -> None:
        """See `Scheme`."""
        quantise_weights(model, lambda weight: quantise_int8_groups(weight.weight))


class Int4(_Kept):
    """4-bit weights; a scale and a min per 32 of them, inputs as in `Int8`. Vocabularies, where each step counts, have
    8."""

    def finish(self, model: nn.Module) -> None:
        """See `Scheme`."""
        quantise_weights(
            model,
            lambda weight: quantise_int8_groups(weight.weight) if weight.is_vocabulary else quantise_int4(weight.weight)
        )


class W8A8(_Kept):
    """8-bit weights with a scale per output, inputs rounded to 8 bits with a scale per token: the fastest prompts on
    AMX, and the least exact, as a token's largest inputs cost the others their precision. Vocabularies are as in
    `Int8`."""

    def finish(self, model: nn.Module) -> None:
        """See `Scheme`."""
        quantise_weights(
            model, lambda weight: (quantise_int8_groups if weight.is_vocabulary else quantise_int8)(weight.weight)
        )


@torch.no_grad()
def quantise_weights(model: nn.Module, quantise: Callable[[StorableWeight], PackedMatrix]) -> None:
    """Quantise every weight that is large enough. Without the native library, whose products these are, the rounded
    values are put back as plain weights: the same answers, at the plain weights' size and speed."""
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
    plain = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1) if is_native else 0
    if plain > before:
        logger.warning(
            "%.0f MB of weights stay plain: packed layout has no place for matrices of their kind", plain / 1e6
        )
    logger.info(
        "weights quantised in %.1f s: %.0f MB are now %.0f MB", time.monotonic() - began, before / 1e6, after / 1e6
    )
