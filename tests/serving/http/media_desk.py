"""A desk that prepares media without decoding, for applications over the fake client."""

from __future__ import annotations

import asyncio
import base64
import hashlib

from headrace.base.config import EngineConfig
from headrace.base.errors import MediaError
from headrace.base.media import MediaArray, MediaItem, MediaPlace
from headrace.base.media_facts import MediaFacts
from headrace.service.media.wire import Job, PreparedItem
from headrace.serving.media.intake import MediaIntake

IMAGE, AUDIO, VIDEO = 290, 291, 292
FACTS = MediaFacts(
    {"image": IMAGE, "video": VIDEO, "audio": AUDIO}, {"image": "<image>", "video": "<video>", "audio": "<audio>"}, 64
)
COUNTS = {"image": 3, "video": 5, "audio": 2}
IDS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
CAT, DOG = b"cat", b"a picture of a dog"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return "data:image/png;base64," + b64(data)


class Desk(MediaIntake):
    """Prepares without decoding: each kind has its number of tokens; data of ``slow`` take their time."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.jobs: list[Job] = []
        self.num_dropped = 0

    def _open(self):
        return self

    async def prepare_job(self, job: Job) -> PreparedItem:
        self.jobs.append(job)
        if job.data == b"slow":
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.num_dropped += 1
                raise
        if job.data == b"bad":
            raise MediaError(f"{job.param} is no image that can be read", param=job.param)
        ids = [IDS[job.kind]] * COUNTS[job.kind]
        place = MediaPlace(job.kind, hashlib.sha256(job.data).digest(), [(0, len(ids))])
        return PreparedItem(MediaItem(place, {"pixel_values": MediaArray("uint8", (1,), b"x")}), ids)

    async def _prepare_one(self, ref, salt):
        found = await self._reader.read_url(ref.url, ref.param)
        return await self.prepare_job(found.job(ref.kind, ref.options, salt).decoded())
