"""Gated activations by own C++ kernels; in plain torch until they are there."""

from __future__ import annotations

import torch

from headrace.kernels.activation import reference
from headrace.kernels.native import NATIVE

SILU, GELU_TANH, CLAMPED = 0, 1, 2


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `SILU_MUL`."""
    ops = NATIVE.find()
    return reference.silu_mul(x) if ops is None else ops.gated(x, SILU)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """See `GELU_TANH_MUL`."""
    ops = NATIVE.find()
    return reference.gelu_tanh_mul(x) if ops is None else ops.gated(x, GELU_TANH)


GATED = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
NUMBERS = {"silu": SILU, "gelu_tanh": GELU_TANH, "clamped": CLAMPED}
"""Of the kernels. The clamped one takes numbers of its own, which mixtures of experts alone pass on."""
