"""`SharedMemory`: agents of one host map each other's regions. A region's descriptor goes over a local socket, to
processes of the same user that know the name of its present life.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import Copy, Region, refuse_unknown

TIMEOUT_S = 2.0
MOST_THREADS = 8
"""That copy at a time: one thread does not fill the memory's bandwidth."""
CREDENTIALS = struct.Struct("3i")


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    socket: str
    num_bytes: int


class SharedDestination:
    """A peer's region, mapped. It stays valid when the peer dies, as mapped memory does."""

    def __init__(self, region: Region, peer: Region):
        self._region, self.peer = region, peer
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "copies")

    def write(self, copies: Sequence[Copy]) -> None:
        """See `Destination`."""
        for copy in copies:
            self._region.check(copy.begin, copy.num_bytes)
            self.peer.check(copy.target, copy.num_bytes)
        list(self._threads.map(self._write, copies))

    def close(self) -> None:
        """See `Destination`."""
        self._threads.shutdown()
        self.peer.close()

    def _write(self, copy: Copy) -> None:
        source = self._region.data[copy.begin : copy.begin + copy.num_bytes]
        np.copyto(self.peer.data[copy.target : copy.target + copy.num_bytes], source)


class SharedMemory:
    """See `TransferBackend`."""

    def __init__(self, region: Region, options: Mapping[str, str]):
        refuse_unknown(options, ())
        self._region = region
        # Abstract: nothing is left in the file system. The name cannot be guessed, and is new in each life.
        self._name = f"headrace-transfer-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"\0{self._name}")
        except OSError as error:
            raise ConfigError(f"transfers over shared memory need Linux: {error}") from error
        self._listener.listen()
        threading.Thread(target=self._hand_out, name="region-door", daemon=True).start()

    def handle(self) -> bytes:
        """See `TransferBackend`."""
        return msgspec.msgpack.encode(_Handle(self._name, self._region.num_bytes))

    def connect(self, handle: bytes) -> SharedDestination:
        """See `TransferBackend`."""
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
        if os.fstat(descriptors[0]).st_size < peer.num_bytes or peer.num_bytes < 1:
            os.close(descriptors[0])
            raise TransferFailed("the peer's memory is smaller than it said")
        return SharedDestination(self._region, Region(descriptors[0], peer.num_bytes))

    def close(self) -> None:
        """See `TransferBackend`."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        self._listener.close()

    def _hand_out(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:  # closed
                return
            with line, contextlib.suppress(OSError):
                line.settimeout(TIMEOUT_S)
                found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
                if CREDENTIALS.unpack(found)[1] == os.getuid():
                    rights = array.array("i", [self._region.descriptor])
                    line.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
