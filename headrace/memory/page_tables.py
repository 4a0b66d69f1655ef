"""`PageTables`: which page holds which positions of which row, for all cache groups, on the device.

Refuses: deciding pages (the scheduler does). Entry i of a row covers positions [i * page_size, (i + 1) * page_size).
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.cache import NULL_PAGE, CacheLayout
from headrace.base.step import PageAppend


class PageTables:
    """``tensor`` [groups, max_rows + 1, num_entries] int32. The last row is the null row: it stays all null pages and
    stands in for padding. A row is cleared whenever it is taken or given back, so that a write beyond a request's own
    pages lands harmlessly in the null page.

    Host and device are updated apart: `flatten` and the run lengths are of the plan being made, ``tensor`` changes in
    stream order, behind the steps in flight."""

    def __init__(self, layout: CacheLayout, device: torch.device):
        self.null_row = layout.max_rows
        self.num_entries = -(-layout.max_model_len // layout.page_size) + 1
        self.tensor = torch.full(
            (len(layout.groups), layout.max_rows + 1, self.num_entries), NULL_PAGE, dtype=torch.int32, device=device
        )
        self._num_pages = [group.num_pages for group in layout.groups]
        # Per group and row (first page, number of consecutive pages). Not reset with the row: an append at entry 0
        # starts a new run. A window's table may begin later; then nothing before is read, and what follows must agree.
        self._runs = np.zeros((len(layout.groups), layout.max_rows, 2), dtype=np.int64)

    def flatten(self, appends: list[PageAppend]) -> tuple[np.ndarray, np.ndarray]:
        """Host arrays ``(flat index into the tensor, page)``, int64, of a plan's appends; checks their bounds."""
        index: list[int] = []
        pages: list[int] = []
        for append in appends:
            stop = append.start + len(append.pages)
            assert 0 <= append.row < self.null_row and append.start >= 0 and stop <= self.num_entries, (
                f"append outside the page table: {append}"
            )
            assert all(0 <= page < self._num_pages[append.group] for page in append.pages), f"no such page: {append}"
            first = (append.group * (self.null_row + 1) + append.row) * self.num_entries
            index.extend(range(first + append.start, first + stop))
            pages.extend(append.pages)
            self._note_run(append)
        return np.array(index, dtype=np.int64), np.array(pages, dtype=np.int64)

    def _note_run(self, append: PageAppend) -> None:
        """Keep the row's run of consecutive pages up to date with an append."""
        run, start = self._runs[append.group, append.row], append.start
        if start == 0 and append.pages:
            run[:] = append.pages[0], 0
        if start < run[1]:  # entries of the run are replaced
            run[1] = start
        if start == run[1]:
            expected = np.arange(run[0] + start, run[0] + start + len(append.pages))
            differs = np.flatnonzero(expected != append.pages)
            run[1] += differs[0] if len(differs) else len(append.pages)

    def find_run(self, group: int, row: int, count: int) -> int | None:
        """The first page of a row if its first ``count`` pages are consecutive (as of the flattened appends), else
        None."""
        first, length = map(int, self._runs[group, row])
        return first if 0 < count <= length else None

    def clear(self, rows: torch.Tensor) -> None:
        """Fill rows [n] int64 with the null page in every group."""
        self.tensor.index_fill_(1, rows, NULL_PAGE)

    def write(self, index: torch.Tensor, pages: torch.Tensor) -> None:
        """Write the arrays of `flatten`, copied to the device. Two appends to the same entry must not share a call, as
        their order would be undefined."""
        self.tensor.view(-1).index_copy_(0, index, pages.to(torch.int32))
