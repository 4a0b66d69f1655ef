"""Whole pages between a cache group's tensors and rows of bytes, all layers in one call. P pages, S rows, n copied.

A row holds one page: the bytes of its parts (one tensor of a layer each) one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires


@dataclass(frozen=True)
class PageParts:
    """The tensors of a cache group as bytes: ``tensors`` are uint8 [P, bytes], contiguous. ``table`` [parts, 3] int64
    on their device: address, bytes of a page, and where in a row these begin. ``page_bytes`` are those of a row;
    ``word`` is the largest power of two up to 8 that divides all of these."""

    tensors: list[torch.Tensor]
    table: torch.Tensor
    page_bytes: int
    word: int

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> PageParts:
        """Of tensors [P, ...] on one device, each contiguous."""
        parts = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
        numbers, at = [], 0
        for part in parts:
            numbers.append((part.data_ptr(), part.shape[1], at))
            at += part.shape[1]
        device = parts[0].device if parts else torch.device("cpu")
        table = torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, 3)
        dividend = 8
        for row in numbers:
            for number in row:
                while number % dividend:
                    dividend //= 2
        return cls(parts, table, at, dividend)


GATHER_PAGES = Operation("gather_pages kernel")
"""``gather_pages(parts: PageParts, pages [n] int64, rows [S, page_bytes] uint8, places [n] int64)``: row ``places[i]``
becomes the bytes of page ``pages[i]``. All on one device; no place occurs twice."""

SCATTER_PAGES = Operation("scatter_pages kernel")
"""``scatter_pages(parts: PageParts, pages [n] int64, rows [S, page_bytes] uint8, places [n] int64)``: page ``pages[i]``
becomes the bytes of row ``places[i]``. All on one device; no page occurs twice."""

for _operation, _name in ((GATHER_PAGES, "gather_pages"), (SCATTER_PAGES, "scatter_pages")):
    _operation.add("reference", f"headrace.kernels.pages.reference:{_name}", doc="plain torch")
    _operation.add(
        "cpu", f"headrace.kernels.pages.cpu:{_name}", supports=requires(device="cpu"), priority=10, doc="own C++"
    )
    _operation.add(
        "triton", f"headrace.kernels.pages.triton:{_name}", supports=requires(device="cuda"), priority=10,
        doc="one launch"
    )
