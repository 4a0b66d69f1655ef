"""`MediaIntake`: the media of requests, from what the request says to items for the engine. Fetching is done here,
decoding in worker processes. Refuses: prompts and protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.base.config import EngineConfig
from headrace.base.errors import MediaError, QueueFull, UnsupportedFeature
from headrace.base.media import MediaKind
from headrace.base.messages import ModelFacts
from headrace.service.media.wire import PreparedItem, Setup
from headrace.service.media.workers import MediaWorkers
from headrace.serving.media.sources import MediaReader

MOST_WORKERS = 4
MOST_OF_ONE = 4
"""Items of a request that are fetched or prepared at a time: those of others have their turns between."""
HELD_RETRY_S = 5.0
"""Seconds after which a clip may be sent again that had no room."""
NOUNS = {"image": "images", "video": "videos", "audio": "audio"}


@dataclass(frozen=True)
class MediaRef:
    """An item that a request holds or names. ``kind`` is image, video or audio; ``url`` also a data URI; ``param`` is
    its place in the request. ``detail`` "low": a small version is enough."""

    kind: MediaKind
    url: str
    param: str
    detail: str | None = None

    @property
    def options(self) -> dict[str, str]:
        """Options that change the prepared item."""
        return {"detail": "low"} if self.detail == "low" else {}


def check_media(refs: Sequence[MediaRef], facts: ModelFacts, config: EngineConfig) -> None:
    """Raise `UnsupportedFeature` for media that the model does not take, and `MediaError` for too many."""
    taken = facts.media.kinds if facts.media is not None else ()
    for ref in refs:
        if ref.kind not in taken:
            raise UnsupportedFeature(f"{ref.param}: {explain_kinds(facts, ref.kind)}", param=ref.param)
    counts: Counter[str] = Counter()
    for ref in refs:
        counts[ref.kind] += 1
        most = config.media.limit(ref.kind)
        if counts[ref.kind] > most:
            raise MediaError(
                f"{ref.param}: this server takes at most {most} {NOUNS[ref.kind]} in one prompt "
                "(--limit-mm-per-prompt)", param=ref.param
            )


def explain_kinds(facts: ModelFacts, kind: str) -> str:
    """Why a model takes no media of a kind, and which do."""
    taken = facts.media.kinds if facts.media is not None else ()
    known = ", ".join(["text", *(NOUNS[each] for each in taken)])
    return (
        f"{facts.model} takes {known} alone, no {NOUNS[kind]}; serve a model that takes {NOUNS[kind]} "
        "(docs/multimodal.md lists them)"
    )


class MediaIntake:
    """The media of one process; used by one event loop. Worker processes start with `start`, or when first needed."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._reader = MediaReader(config.media)
        self._workers: MediaWorkers | None = None
        self._held: Counter[int] = Counter()  # by `id` of a clip, which its holders keep alive
        self._held_bytes = 0

    async def prepare_clip(self, data: bytes, param: str, facts: ModelFacts, *, salt: str = "") -> PreparedItem:
        """A clip of any length, to be heard window by window; see `Preparer`. Raises as `prepare` does."""
        check_media([MediaRef("audio", "", param)], facts, self._config)
        found = await self._reader.take(data, param)
        return await self._open().prepare(found.job("audio", {"windows": "all"}, salt))

    @contextlib.contextmanager
    def hold(self, clip: PreparedItem) -> Iterator[None]:
        """Within, a clip counts among those whose windows are heard one after the other: the engine has but one window
        of each. Raises `MediaError` for one that never fits, and `QueueFull`."""
        key, size, most = id(clip), clip.num_bytes, self._config.scheduler.max_queued_media_mib
        if size > most << 20:
            raise MediaError(
                f"the clip takes {size >> 20} MiB once it is prepared, and at most {most} MiB are held "
                "(--max-queued-media-mib); split it", param="file",
            )
        if key not in self._held and self._held_bytes + size > most << 20:
            raise QueueFull(
                f"the clips that are being written down take {self._held_bytes >> 20} MiB, the limit is "
                "max_queued_media_mib; try again when some have ended", retry_after=HELD_RETRY_S
            )
        self._held_bytes += 0 if key in self._held else size
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._held_bytes -= size

    async def start(self, facts: ModelFacts) -> None:
        """Start the worker processes, which load the model's processor."""
        if facts.media is not None:
            await self._open().start()

    async def prepare(self, refs: Sequence[MediaRef], facts: ModelFacts, *, salt: str = "") -> list[PreparedItem]:
        """The items of a request, in order; `MOST_OF_ONE` at a time are fetched and prepared. Requests with different
        salts learn nothing of each other: what one has had prepared is prepared again for another. Raises
        `UnsupportedFeature`, `MediaError` or `QueueFull`, for the first that fails; the others are then dropped."""
        check_media(refs, facts, self._config)
        turns = asyncio.Semaphore(MOST_OF_ONE)

        async def prepare(ref: MediaRef) -> PreparedItem:
            async with turns:
                return await self._prepare_one(ref, salt)

        tasks = [asyncio.ensure_future(prepare(ref)) for ref in refs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """End the worker processes."""
        if self._workers is not None:
            self._workers.close()

    async def _prepare_one(self, ref: MediaRef, salt: str) -> PreparedItem:
        found = await self._reader.read_url(ref.url, ref.param)
        return await self._open().prepare(found.job(ref.kind, ref.options, salt))

    def _open(self) -> MediaWorkers:
        if self._workers is None:
            count = self._config.media.media_workers or min(MOST_WORKERS, max(1, (os.cpu_count() or 2) // 2))
            self._workers = MediaWorkers(Setup(self._config.model, self._config.media), count)
        return self._workers
