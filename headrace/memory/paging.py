"""`PageCopier`: whole pages of all cache groups as rows of bytes, all layers of a page in one call.

Refuses: streams, threads and who owns which page. Calls work in order of the current stream.
"""

from __future__ import annotations

import torch

from headrace.base.cache import NULL_PAGE
from headrace.kernels.operation import KernelQuery
from headrace.kernels.pages import GATHER_PAGES, SCATTER_PAGES, PageParts
from headrace.memory.copies import to_device
from headrace.memory.pools import Pool


class PageCopier:
    """Over the pools of one device, one per cache group. A row of bytes has a page's parts in the order of
    `Pool.parts`, each contiguous."""

    def __init__(self, pools: list[Pool], device: torch.device):
        self.device, self.parts = device, [pool.parts for pool in pools]
        self._parts = [PageParts.of([part.tensor for part in parts]) for parts in self.parts]
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        query = KernelQuery(device.type, "uint8", capability)
        self._gather, self._scatter = GATHER_PAGES.choose(query), SCATTER_PAGES.choose(query)

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of a group in all layers that are here."""
        return self._parts[group].page_bytes

    def gather(self, group: int, pages: list[int], rows: torch.Tensor, places: list[int]) -> None:
        """Copy pages to ``rows`` [S, page bytes] uint8 on the device; page ``pages[i]`` to row ``places[i]``."""
        self._gather(self._parts[group], self.upload(pages), rows, self.upload(places))

    def scatter(self, group: int, pages: list[int], rows: torch.Tensor, places: list[int]) -> None:
        """Copy rows to pages: the reverse of `gather`."""
        self.scatter_uploaded(group, self.upload(pages), rows, self.upload(places))

    def scatter_uploaded(self, group: int, pages: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """`scatter` with numbers from `upload`, int64."""
        self._scatter(self._parts[group], pages, rows, places)

    def warm_up(self, group: int, rows: torch.Tensor) -> None:
        """Compile what copies between pages and rows like these, of which there is one at least, before a step waits
        for it: the null page goes to the first row and back."""
        self.gather(group, [NULL_PAGE], rows, [0])
        self.scatter(group, [NULL_PAGE], rows, [0])

    def upload(self, numbers: list[int]) -> torch.Tensor:
        """Numbers of pages or rows as int64 on the device, in order of the current stream."""
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.device)
