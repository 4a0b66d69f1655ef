"""`Door`: hands the descriptor of a region out over a local socket, to processes of the same user that know the name of
its present life; `take_descriptor`: the other side. `RegionMapping`: the region of another process, in this one.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import AnyRegion, Region

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
PAUSE_S = 0.1
RETRY_S = 10.0
"""From one attempt to map a region to the next at least: one may take `TIMEOUT_S`."""
CREDENTIALS = struct.Struct("3i")


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    socket: str
    num_bytes: int


class Door:
    """Of one region, until it is closed. Raises `ConfigError` where there are no such sockets."""

    def __init__(self, region: AnyRegion):
        self._region = region
        # Abstract: nothing is left in the file system. The name cannot be guessed, and is new in each life.
        self._name = f"headrace-transfer-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"\0{self._name}")
        except OSError as error:
            raise ConfigError(f"transfers between processes of one host need Linux: {error}") from error
        self._listener.listen()
        self._is_closed = False
        threading.Thread(target=self._hand_out, name="region-door", daemon=True).start()

    @property
    def handle(self) -> bytes:
        """What `take_descriptor` needs."""
        return msgspec.msgpack.encode(_Handle(self._name, self._region.num_bytes))

    def close(self) -> None:
        """Nobody gets the descriptor any more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        self._listener.close()

    def _hand_out(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(PAUSE_S)  # no descriptor is left: others may give theirs back
                continue
            with line, contextlib.suppress(OSError):
                line.settimeout(TIMEOUT_S)
                found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
                if CREDENTIALS.unpack(found)[1] == os.getuid():
                    rights = array.array("i", [self._region.descriptor])
                    line.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def take_descriptor(handle: bytes) -> tuple[int, int]:
    """The descriptor behind a peer's `Door`, which the caller closes, and how many bytes there are. Raises
    `TransferFailed`."""
    try:
        peer: _Handle = msgspec.msgpack.decode(handle, type=_Handle)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(TIMEOUT_S)
            line.connect(f"\0{peer.socket}")
            _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
    except (OSError, msgspec.DecodeError) as error:
        raise TransferFailed(f"no shared memory with the peer, which must be on this host: {error}") from error
    if not descriptors:
        raise TransferFailed("the peer gave no memory: it belongs to another user")
    if peer.num_bytes < 1:
        os.close(descriptors[0])
        raise TransferFailed("the peer's memory is smaller than it said")
    return descriptors[0], peer.num_bytes


class RegionMapping:
    """``attach`` is called with each region and its epoch, and with None when one is given up. A region that cannot be
    mapped for lack of descriptors, memory or time is missing until `retry` maps it."""

    def __init__(self, attach: Callable[[AnyRegion | None, int], None]):
        self._attach = attach
        self._region: Region | None = None
        self._missing: tuple[bytes, int] | None = None
        self._tried_at = 0.0

    def open(self, handle: bytes, epoch: int) -> None:
        """Map the region behind a `Door`, in place of an earlier one; empty: none."""
        self._attach(None, 0)
        if self._region is not None:
            self._region.close()
            self._region = None
        self._missing = (handle, epoch) if handle else None
        self._tried_at = 0.0
        self.retry()

    def retry(self) -> None:
        """Map what is missing, unless that was tried a moment ago."""
        if self._missing is None or (self._tried_at and time.monotonic() - self._tried_at < RETRY_S):
            return
        handle, epoch = self._missing
        try:
            descriptor, num_bytes = take_descriptor(handle)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, descriptor)
                self._region = Region(descriptor, num_bytes)
                undo.pop_all()
        except (TransferFailed, OSError) as error:
            logger.error("the memory of transfers cannot be mapped here, so their pages are computed: %s", error)
            self._tried_at = time.monotonic()
            return
        self._missing = None
        self._attach(self._region, epoch)
