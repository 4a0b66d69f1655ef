"""`CheckedStore`: a store whose pages carry a checksum, as bytes that were on other machines may have changed there."""

from __future__ import annotations

import logging
import struct
import time
import zlib

from headrace.memory.storage import PageStore

logger = logging.getLogger(__name__)

_TRAILER = struct.Struct("<4sI")
"""Behind the page: magic, and CRC-32 of its name and its bytes."""
MAGIC = b"hrp1"
LOG_PERIOD_S = 60.0


class CheckedStore:
    """See `PageStore`. A page that is damaged, or another one's, is not there. Pages of ``store`` are `TRAILER_BYTES`
    longer than these."""

    TRAILER_BYTES = _TRAILER.size

    def __init__(self, store: PageStore):
        self._store = store
        self._logged_at = -LOG_PERIOD_S

    def exists(self, names: list[str]) -> list[bool]:
        """See `PageStore`."""
        return self._store.exists(names)

    def get(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        pages = [bytearray(len(buffer) + _TRAILER.size) for buffer in buffers]
        found = self._store.get(names, [memoryview(page) for page in pages])
        return [has and self._take(*each) for has, each in
                zip(found, zip(names, pages, buffers, strict=True), strict=True)]

    def put(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        pages = [b"".join((buffer, _trailer(name, buffer))) for name, buffer in zip(names, buffers, strict=True)]
        return self._store.put(names, [memoryview(page) for page in pages])

    def close(self) -> None:
        """See `PageStore`."""
        self._store.close()

    def _take(self, name: str, page: bytearray, buffer: memoryview) -> bool:
        contents = memoryview(page)[: len(buffer)]
        if page[len(buffer) :] == _trailer(name, contents):
            buffer[:] = contents
            return True
        now = time.monotonic()
        if now - self._logged_at >= LOG_PERIOD_S:
            self._logged_at = now
            logger.warning("remote cache: page %s came damaged, and is computed", name)
        return False


def _trailer(name: str, page: memoryview) -> bytes:
    return _TRAILER.pack(MAGIC, zlib.crc32(page, zlib.crc32(name.encode())))
