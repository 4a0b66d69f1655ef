"""What compressor state must be kept. Torch-free: the scheduler loads it by name."""

from __future__ import annotations

from headrace.base.cache import CacheSpec


class CompressorStatePolicy:
    """Rows of tokens whose windows are not finished, and of the window before where windows overlap. At the end of a
    page all windows are finished: a hit needs the last page for overlapping windows, and none for others."""

    is_chained = False

    def __init__(self, spec: CacheSpec, page_size: int):
        self._page_size, self._ratio = page_size, spec.compress_ratio
        self._back = spec.window - spec.compress_ratio  # how far before an unfinished window rows are read

    def first_needed(self, length: int) -> int:
        return max(0, length - length % self._ratio - self._back) // self._page_size

    def peak_pages(self, length: int) -> int:
        return min(-(-length // self._page_size), 2 if self._back else 1)
