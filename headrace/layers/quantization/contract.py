"""The contract of quantised weights. A `Scheme` is one form of them; those that a model needs are chained, each
wrapping the ones of lower priority: checkpoint forms are innermost, what the user wants layers to keep is outermost.

Refuses: what families call their tensors, and kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from headrace.base.registry import Registry

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class SchemeQuery:
    """What schemes are asked about. ``stored``: the checkpoint's ``quant_method`` ("" where it states none: tensors'
    types tell). ``wanted``: the scheme that the user wants layers to keep ("": none). ``device`` and ``dtype`` as in
    `KernelQuery`."""

    device: str = "cpu"
    dtype: str = "float32"
    stored: str = ""
    wanted: str = ""


class Scheme(Protocol):
    """One form of quantised weights; built once per model."""

    def __init__(self, query: SchemeQuery): ...

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """Checkpoint tensors on their way to the parameters, as the scheme inside passed them on; each is the giver's
        until the next one is asked for. Passes on what is not its form. Raises `WeightError`."""

    def finish(self, model: nn.Module) -> None:
        """Called once every parameter is filled: change what layers keep and how they multiply."""


SCHEMES: Registry[type[Scheme]] = Registry("quantization scheme")
"""Asked with a `SchemeQuery`. Every scheme that supports it takes part, in order of priority, the lowest innermost."""
