"""Copies of pages by own C++; by the reference until that is loaded."""

from __future__ import annotations

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.pages import PageParts, reference


def gather_pages(parts: PageParts, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    """See `headrace.kernels.pages.GATHER_PAGES`."""
    ops = NATIVE.find()
    if ops is None:
        reference.gather_pages(parts, pages, rows, places)
    else:
        ops.copy_pages(parts.table, pages, rows, places, True)


def scatter_pages(parts: PageParts, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    """See `headrace.kernels.pages.SCATTER_PAGES`."""
    ops = NATIVE.find()
    if ops is None:
        reference.scatter_pages(parts, pages, rows, places)
    else:
        ops.copy_pages(parts.table, pages, rows, places, False)
