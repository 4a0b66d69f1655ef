"""What fell back: figures are of other kernels where own ones could not be compiled or loaded, and must say so."""

from __future__ import annotations

import sys
from typing import Any

MARK = "(fell back)"
"""Beside the name of a model whose figures are of other kernels."""


def list_fallen_back() -> tuple[str, ...]:
    """What runs instead in this process, and why; see `headrace.kernels.cuda_source.fallen_back`."""
    cuda_source = sys.modules.get("headrace.kernels.cuda_source")  # else nothing was asked of it
    return () if cuda_source is None else cuda_source.fallen_back()


def has_fallen_back(llm: Any) -> bool:
    """Whether a model runs, here or in processes of its own, without kernels that it should have."""
    return bool(list_fallen_back()) or llm.stats().kernel_fallbacks_total > 0


def tell() -> None:
    """Print a line for each, and nothing where all kernels are there."""
    for line in list_fallen_back():
        print(f"fell back, so that figures above are of other kernels: {line}", flush=True)
