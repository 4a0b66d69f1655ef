"""`MediaReader`: the bytes of an image, video or audio clip that a request names: a data URI, base64 text, an http or
https URL, or a file below ``--allowed-local-media-path``. Refuses: decoding, and everything that is not bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from headrace.base.errors import MediaError
from headrace.base.media import Base64Text, MediaKind
from headrace.base.media_config import MediaConfig
from headrace.service.media.wire import Job
from headrace.serving.media.fetching import Fetcher

T = TypeVar("T")

AT_ONCE = 1 << 16
"""Bytes below which work is done on the event loop."""
PIECE_CHARS = 1 << 18
MAX_HEADER = 256
BASE64 = "base64,"


@dataclass(frozen=True)
class MediaBytes:
    """An item as it was sent. ``sha256`` is of ``data``, which with ``is_base64`` are base64 text; ``param`` names its
    place in the request."""

    data: bytes
    sha256: bytes
    param: str
    is_base64: bool = False

    def job(self, kind: MediaKind, options: dict[str, str], salt: str = "") -> Job:
        """The job for a media worker."""
        return Job(kind, self.data, self.sha256, self.param, dict(options), self.is_base64, salt)


class MediaReader:
    """Reads for one process; used by one event loop."""

    def __init__(self, config: MediaConfig):
        self._config = config
        self._fetcher = Fetcher(config)

    async def read_url(self, url: str, param: str) -> MediaBytes:
        """The content of a data URI, http, https or file URL. Raises `MediaError`, or `QueueFull`. Base64 stays text:
        the same text is found among what is prepared by its digest alone."""
        scheme, is_base64 = url[:8].partition(":")[0].lower(), False
        if isinstance(url, Base64Text):
            self._check_size(len(url.data) // 4 * 3, param)
            data, is_base64 = url.data, True
        elif scheme == "data":
            data, is_base64 = await self._off_loop(len(url), lambda: self._read_uri(url, param))
        elif scheme == "file":
            data = await asyncio.to_thread(self._read_file, url, param)
        else:
            data = await self._fetcher.fetch(url, param)
        return await self._finish(data, param, is_base64=is_base64)

    async def take(self, data: bytes, param: str) -> MediaBytes:
        """Data that are here already. Raises `MediaError`."""
        self._check_size(len(data), param)
        return await self._finish(data, param)

    async def _finish(self, data: bytes, param: str, *, is_base64: bool = False) -> MediaBytes:
        if not data:
            raise MediaError(f"{param} is empty", param=param)
        digest = await self._off_loop(len(data), lambda: hashlib.sha256(data).digest())
        return MediaBytes(data, digest, param, is_base64)

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        return work() if size <= AT_ONCE else await asyncio.to_thread(work)

    def _check_size(self, size: int, param: str) -> None:
        if size > self._config.max_bytes:
            raise MediaError(
                f"{param} is larger than {self._config.media_max_mib} MiB (--media-max-mib)", param=param
            )

    def _read_uri(self, uri: str, param: str) -> tuple[bytes, bool]:
        """The data, and whether they are base64 text."""
        comma = uri.find(",", 0, MAX_HEADER)
        if comma < 0:
            raise MediaError(f"{param} must be data:TYPE;base64,DATA", param=param)
        if uri[: comma + 1].lower().endswith(";" + BASE64):
            self._check_size((len(uri) - comma - 1) // 4 * 3, param)
            try:
                # in pieces, as each holds the GIL; joining them does not
                begins = range(comma + 1, len(uri), PIECE_CHARS)
                return b"".join([uri[begin : begin + PIECE_CHARS].encode("ascii") for begin in begins]), True
            except UnicodeEncodeError:
                raise MediaError(f"{param} is not valid base64", param=param) from None
        self._check_size(len(uri) // 3, param)
        data = unquote_to_bytes(uri[comma + 1 :])
        self._check_size(len(data), param)
        return data, False

    def _read_file(self, url: str, param: str) -> bytes:
        folder = self._config.allowed_local_media_path
        if folder is None:
            raise MediaError(
                f"{param}: this server reads no files (--allowed-local-media-path); send the data inside the request",
                param=param
            )
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = None
        if parts is None or parts.netloc not in ("", "localhost"):
            raise MediaError(f"{param} must name a file of this host: file:///FOLDER/FILE", param=param)
        try:
            root = Path(folder).resolve(strict=True)
            path = Path(os.fsdecode(unquote_to_bytes(parts.path))).resolve(strict=True)
            is_below = path.is_relative_to(root)
            data = self._read_below(path, param) if is_below else b""
        except MediaError:
            raise
        except (OSError, ValueError):  # ValueError: a zero byte in the name
            is_below = False
        if not is_below:  # whether a file exists outside must not show
            raise MediaError(f"{param}: there is no such file that may be read", param=param)
        return data

    def _read_below(self, path: Path, param: str) -> bytes:
        # The path has no symbolic links any more. One that was put there since makes the open fail at its last part.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise MediaError(f"{param} is not a regular file", param=param)
            self._check_size(found.st_size, param)
            data = file.read(self._config.max_bytes + 1)
        self._check_size(len(data), param)
        return data
