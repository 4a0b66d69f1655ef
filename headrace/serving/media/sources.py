"""`MediaReader`: the bytes of an image, video or audio clip that a request names: a data URI, base64 text, an http or
https URL, or a file below ``--allowed-local-media-path``. Refuses: decoding, and everything that is not bounded.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from headrace.base.errors import MediaError
from headrace.base.media_config import MediaConfig
from headrace.serving.media.fetching import Fetcher

T = TypeVar("T")

PIECE = 1 << 20
"""Characters of base64 that are decoded in one call, which holds the GIL: about a millisecond."""
AT_ONCE = 1 << 16
"""Bytes below which work is done on the event loop."""
MAX_HEADER = 256
BASE64 = "base64,"


@dataclass(frozen=True)
class MediaBytes:
    """An item as it was sent. ``sha256`` is of ``data``; ``param`` names its place in the request."""

    data: bytes
    sha256: bytes
    param: str


class MediaReader:
    """Reads for one process; used by one event loop."""

    def __init__(self, config: MediaConfig):
        self._config = config
        self._fetcher = Fetcher(config)

    async def read_url(self, url: str, param: str) -> MediaBytes:
        """What a data URI, http, https or file URL stands for. Raises `MediaError`, or `QueueFull`."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            data = await self._off_loop(len(url), lambda: self._decode_uri(url, param))
        elif scheme == "file":
            data = await asyncio.to_thread(self._read_file, url, param)
        else:
            data = await self._fetcher.fetch(url, param)
        return await self._finish(data, param)

    async def take(self, data: bytes, param: str) -> MediaBytes:
        """Data that are here already. Raises `MediaError`."""
        self._check_size(len(data), param)
        return await self._finish(data, param)

    async def _finish(self, data: bytes, param: str) -> MediaBytes:
        if not data:
            raise MediaError(f"{param} is empty", param=param)
        digest = await self._off_loop(len(data), lambda: hashlib.sha256(data).digest())
        return MediaBytes(data, digest, param)

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        return work() if size <= AT_ONCE else await asyncio.to_thread(work)

    def _check_size(self, size: int, param: str) -> None:
        if size > self._config.max_bytes:
            raise MediaError(
                f"{param} is larger than {self._config.media_max_mib} MiB (--media-max-mib)", param=param
            )

    def _decode_uri(self, uri: str, param: str) -> bytes:
        comma = uri.find(",", 0, MAX_HEADER)
        if comma < 0:
            raise MediaError(f"{param} must be data:TYPE;base64,DATA", param=param)
        if uri[: comma + 1].lower().endswith(";" + BASE64):
            return self._decode_base64(uri, comma + 1, param)
        self._check_size(len(uri) // 3, param)
        data = unquote_to_bytes(uri[comma + 1 :])
        self._check_size(len(data), param)
        return data

    def _decode_base64(self, text: str, begin: int, param: str) -> bytes:
        self._check_size((len(text) - begin) // 4 * 3, param)
        decoded: list[bytes] = []
        rest = b""
        try:
            while begin < len(text):
                piece = text[begin : begin + PIECE].encode("ascii")
                begin += PIECE
                # Line breaks, and the alphabet for URLs; what is left over after a multiple of four waits.
                piece = rest + piece.translate(_URL_SAFE, b" \r\n\t")
                end = len(piece) if begin >= len(text) else len(piece) // 4 * 4
                piece, rest = piece[:end], piece[end:]
                decoded.append(binascii.a2b_base64(piece + b"=" * (-len(piece) % 4), strict_mode=True))
        except (binascii.Error, UnicodeEncodeError):
            raise MediaError(f"{param} is not valid base64", param=param) from None
        return b"".join(decoded)

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


_URL_SAFE = bytes.maketrans(b"-_", b"+/")
