"""Checkpoint weights: reading safetensors and GGUF files, drawing random ones, GGUF naming.

Importing this package imports no torch: ``gguf_file`` and ``gguf_naming`` serve torch-free rooms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.models.weights.dummy import draw_dummy_weights
    from headrace.models.weights.loading import open_weights

__all__ = ["draw_dummy_weights", "open_weights"]

_HOMES = {"draw_dummy_weights": "headrace.models.weights.dummy", "open_weights": "headrace.models.weights.loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
