"""Messages between a process and its media workers: msgpack records, each with a length prefix (uint32,
little-endian), over a socket pair."""

from __future__ import annotations

import struct
from typing import Any, Protocol

import msgspec

from headrace.base.config import ModelConfig
from headrace.base.media import MediaItem, MediaKind
from headrace.base.media_config import MediaConfig
from headrace.base.messages import ErrorInfo

LENGTH = struct.Struct("<I")
PREPARER = "headrace.service.media.preparing:Preparer"
"""Leads to torch and transformers."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message to a worker: the model whose processor it runs, and the bounds. ``preparer`` is the class that
    prepares items, as ``"module:Class"``."""

    model: ModelConfig
    media: MediaConfig
    preparer: str = PREPARER


class Job(msgspec.Struct, frozen=True, tag="job"):
    """One item to prepare. ``sha256`` is of ``data``. ``options`` are those of the request, such as ``detail``."""

    kind: MediaKind
    data: bytes
    sha256: bytes
    param: str
    options: dict[str, Any] = {}


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
    """The item of a job."""

    item: PreparedItem


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
encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def frame(message: ToWorker | FromWorker) -> bytes:
    """A message with its length prefix."""
    payload = encode(message)
    return LENGTH.pack(len(payload)) + payload
