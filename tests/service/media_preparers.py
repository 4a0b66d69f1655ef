"""A preparer for tests of workers: what it does is written in the data."""

from __future__ import annotations

import os
import time

from headrace.base.errors import MediaError
from headrace.base.media import MediaArray, MediaItem, MediaPlace
from headrace.service.media.wire import Job, PreparedItem, Setup


class Obedient:
    """Crashes, hangs or fills memory on request."""

    def __init__(self, setup: Setup):
        self.num_prepared = 0

    def prepare(self, job: Job) -> PreparedItem:
        word, _, argument = job.data.decode().rstrip().partition(" ")
        self.num_prepared += 1
        if word == "crash":
            os._exit(7)
        if word == "sleep":
            time.sleep(float(argument))
        if word == "refuse":
            raise MediaError(f"{job.param} is refused", param=job.param)
        if word == "raise":
            raise KeyError("a mistake")
        if word == "fill":
            bytearray(64 << 30)
        size = int(argument) if word == "size" else 1
        pixels = MediaArray("uint8", (size,), bytes(size))
        place = MediaPlace("image", job.sha256, [(0, 1)], numbers={"pid": os.getpid(), "count": self.num_prepared})
        return PreparedItem(MediaItem(place, {"pixel_values": pixels}), [5], "<image>")
