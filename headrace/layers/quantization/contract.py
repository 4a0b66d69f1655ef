"""The contract of quantised weights. A `Scheme` is one numeric format; the schemes that a model needs are chained, each
reading the output of those of lower priority: checkpoint formats come first (innermost), the format that the user wants
layers to keep comes last (outermost).

Schemes know neither the tensor names of families nor kernels' implementations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from headrace.base.registry import Registry

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class SchemeQuery:
    """What schemes declare support for. ``stored``: the checkpoint's ``quant_method``; "" where it states none, and
    tensors are recognised by their types. ``wanted``: the scheme that the user wants layers to keep; "" for none.
    ``device`` and ``dtype`` as in `KernelQuery`. ``config``: the checkpoint's ``quantization_config``, {} where it has
    none. ``keeps_codes``: layers can keep quantised weights as they are, if these come as `CodedTensor`."""

    device: str = "cpu"
    dtype: str = "float32"
    stored: str = ""
    wanted: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    keeps_codes: bool = False


class Scheme(Protocol):
    """One format of quantised weights; built once per model."""

    def __init__(self, query: SchemeQuery): ...

    def read(self, tensors: Iterable[Named]) -> Iterable[Named]:
        """Transform checkpoint tensors, as the inner scheme yields them, on their way to the parameters. A tensor is
        valid only until the next one is requested: keep a copy of what must wait. Tensors of other formats pass
        unchanged. Raises `WeightError`."""

    def finish(self, model: nn.Module) -> None:
        """Called once every parameter is filled: may replace parameters by stored weights."""


SCHEMES: Registry[type[Scheme]] = Registry("quantization scheme")
"""Queried with a `SchemeQuery`. Every scheme that supports it is part of the chain, by priority, lowest innermost."""
