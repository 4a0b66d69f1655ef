"""`HeldMedia`: the pixels and samples of requests that have not ended, one copy of equal items, within a number of
bytes. They are kept for the encoder, which may need them again after a retraction.

Refuses: what encoders make of them (``encoding``), and reading them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.base.errors import RequestError
from headrace.base.media import MediaArray, MediaItem
from headrace.base.messages import EngineRequest
from headrace.scheduling.request import Request


@dataclass
class _Held:
    """One item's arrays; ``count`` requests have it."""

    arrays: dict[str, MediaArray]
    num_bytes: int
    count: int = 0


class HeldMedia:
    """Media of requests that have not ended, by content digest. ``most_bytes``: limit for all together."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._held: dict[bytes, _Held] = {}
        # Of the latest request with followers, whether it was let in or not, and how many of these are to come.
        self._latest: dict[bytes, MediaItem] = {}
        self._num_followers = 0

    def share(self, submitted: EngineRequest) -> EngineRequest:
        """The request with what is held in place of its own copies. Items that come without arrays, as those of
        further choices do, take them from the request before."""
        if not submitted.media:
            return submitted
        items = [msgspec.structs.replace(item, arrays=self._find(item), num_followers=0) for item in submitted.media]
        if submitted.media[0].arrays:
            self._num_followers = submitted.media[0].num_followers
            self._latest = {item.place.digest: item for item in items}
        else:
            self._num_followers -= 1
        if self._num_followers <= 0:  # or the pixels of the latest request would be kept until the next one
            self._latest = {}
        return msgspec.structs.replace(submitted, media=items)

    def _find(self, item: MediaItem) -> dict[str, MediaArray]:
        held, latest = self._held.get(item.place.digest), self._latest.get(item.place.digest)
        if held is not None:
            return held.arrays
        return latest.arrays if latest is not None and not item.arrays else item.arrays

    def has_room(self, request: Request) -> bool:
        """Whether the request's media fit beside those of others. Raises `RequestError` for more than fit at all."""
        own = {item.place.digest: item.num_bytes for item in request.media}
        if sum(own.values()) > self.most_bytes:
            raise RequestError(
                f"the media of this request take {sum(own.values()) >> 20} MiB once they are prepared, and at most "
                f"{self.most_bytes >> 20} MiB are held (--max-queued-media-mib); send fewer, or smaller ones",
                param="media",
            )
        return self.num_bytes + sum(size for key, size in own.items() if key not in self._held) <= self.most_bytes

    def enter(self, request: Request) -> None:
        """The request is let in."""
        for item in request.media:
            held = self._held.get(item.place.digest)
            if held is None:
                held = self._held[item.place.digest] = _Held(item.arrays, item.num_bytes)
                self.num_bytes += held.num_bytes
            held.count += 1

    def leave(self, request: Request) -> None:
        """The request has ended."""
        for item in request.media:
            held = self._held[item.place.digest]
            held.count -= 1
            if not held.count:
                del self._held[item.place.digest]
                self.num_bytes -= held.num_bytes
