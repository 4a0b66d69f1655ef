"""The operations of this package in plain torch: the oracle, one copy per part."""

from __future__ import annotations

import torch

from headrace.kernels.pages import PageParts


def gather_pages(parts: PageParts, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    """See `headrace.kernels.pages.GATHER_PAGES`."""
    at = 0
    for part in parts.tensors:
        width = part.shape[1]
        rows[:, at : at + width].index_copy_(0, places, part.index_select(0, pages))
        at += width


def scatter_pages(parts: PageParts, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
    """See `headrace.kernels.pages.SCATTER_PAGES`."""
    at = 0
    for part in parts.tensors:
        width = part.shape[1]
        part.index_copy_(0, pages, rows[:, at : at + width].index_select(0, places))
        at += width
