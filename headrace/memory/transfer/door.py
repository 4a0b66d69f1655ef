"""`Door`: hands the descriptor of a region out over a local socket, to processes of the same user that know the name of
its present life; `take_descriptor`: the other side.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import struct
import threading
import time

import msgspec

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import AnyRegion

TIMEOUT_S = 2.0
PAUSE_S = 0.1
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
