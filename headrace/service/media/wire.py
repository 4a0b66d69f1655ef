"""Messages between a process and its media workers: msgpack records, each with a length prefix (uint32,
little-endian), over a socket pair. Behind a job and a prepared item come their data, which are never encoded: each is
read into the memory that it stays in."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

import msgspec

from headrace.base.config import ModelConfig
from headrace.base.errors import MediaError
from headrace.base.media import MediaItem, MediaKind, give_data, take_data
from headrace.base.media_config import MediaConfig
from headrace.base.messages import ErrorInfo
from headrace.service.framing import frame

PREPARER = "headrace.service.media.preparing:Preparer"
"""Leads to torch and transformers."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message to a worker: the model whose processor it runs, and the bounds. ``preparer`` is the class that
    prepares items, as ``"module:Class"``."""

    model: ModelConfig
    media: MediaConfig
    preparer: str = PREPARER


class Job(msgspec.Struct, frozen=True, tag="job"):
    """One item to prepare. ``sha256`` is of ``data``, which with ``is_base64`` are base64 text, and may be a view of a
    request's body. ``options`` are those of the request, such as ``detail``. Requests with different salts (``salt``)
    do not share what was prepared. ``size``: bytes of data that follow the message."""

    kind: MediaKind
    data: bytes
    sha256: bytes
    param: str
    options: dict[str, Any] = {}
    is_base64: bool = False
    salt: str = ""
    size: int = 0

    def decoded(self) -> Job:
        """The job with the data of a file; raises `MediaError` for text that is not base64. Takes some 4 ms a MB and
        holds the GIL, which is why worker processes do it."""
        if not self.is_base64:
            return self
        given = bytes(self.data)  # of bytes it is the same, of a view a copy
        given = unquote_to_bytes(given) if b"%" in given else given  # URIs may encode any letter
        text = given.translate(_URL_SAFE, b" \r\n\t")
        try:
            data = binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
        except binascii.Error:
            raise MediaError(f"{self.param} is not valid base64", param=self.param) from None
        if not data:
            raise MediaError(f"{self.param} is empty", param=self.param)
        return msgspec.structs.replace(self, data=data, sha256=hashlib.sha256(data).digest(), is_base64=False)


_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class PreparedItem(msgspec.Struct, frozen=True):
    """An item that has no place in a prompt yet: its runs begin at 0. ``token_ids`` stand for it in the place of what
    marks it in a prompt; so does ``text``, which may share tokens with the text around it, or None where there is none.
    """

    item: MediaItem
    token_ids: list[int]
    text: str | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, roughly."""
        return self.item.num_bytes + 16 * len(self.token_ids)


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The item of a job, whose arrays have no data: these follow the message one by one, ``sizes`` bytes each."""

    item: PreparedItem
    sizes: list[int]

    def join(self, data: Sequence[bytes]) -> PreparedItem:
        """The item again."""
        (item,) = give_data([self.item.item], data)
        return msgspec.structs.replace(self.item, item=item)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why a job, or the set-up, failed."""

    error: ErrorInfo


class Preparing(Protocol):
    """What `Setup.preparer` names; built with the set-up."""

    def prepare(self, job: Job) -> PreparedItem:
        """The item of a job; raises `MediaError`."""

    def prepare_value(self, kind: MediaKind, value: Any, param: str) -> PreparedItem:
        """The item of an image or array in memory; raises `MediaError`."""


ToWorker = Setup | Job
FromWorker = Prepared | Failed
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def pack_job(job: Job) -> list[bytes]:
    """What is sent of a job, part by part."""
    return [frame(msgspec.structs.replace(job, data=b"", size=len(job.data))), job.data]


def pack_item(prepared: PreparedItem) -> list[bytes]:
    """What is sent of a prepared item, part by part."""
    (item,), data = take_data([prepared.item])
    return [frame(Prepared(msgspec.structs.replace(prepared, item=item), list(map(len, data)))), *data]
