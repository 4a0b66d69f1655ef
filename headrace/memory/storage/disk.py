"""`DiskStore`: a file a page, in a folder that survives restarts, is never larger than told, and may be deleted at any
time.

A file is a header (`_HEADER`) and the page. Its checksum finds torn writes, bad sectors, and files that have got the
name of another; nothing is synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import IO

from headrace.base.errors import ConfigError
from headrace.memory.storage import StoreOptions

logger = logging.getLogger(__name__)

FORMAT = b"headrace"
VERSION = 2
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
"""Errors that say nothing of the file: the page can be read later."""
_HEADER = struct.Struct("<8sIIQ40x")
"""Magic, version, CRC-32 of the name and the page, bytes of the page; 64 bytes in all."""
SUFFIX, LOCK = ".page", "lock"
LOG_PERIOD_S = 60.0
PAUSE_S = 10.0
"""After a write has failed, so long none is tried: a full disk stays full for a while."""
FULL = {errno.ENOSPC, errno.EDQUOT}
FULL_S = 600.0
"""After the disk was full, for so long pages take the place of older ones, though more are allowed."""


class DiskStore:
    """Owns ``place-N`` of its folder, which one process may use at a time. Least recently used files go first."""

    def __init__(self, options: StoreOptions):
        assert options.folder is not None
        self._root = options.folder / f"place-{options.place}"
        self._capacity, self._num_bytes = options.capacity, 0
        self._num_writing = 0  # bytes of those: of files that are being written, which cannot be evicted
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes by name, least recently used first
        self._mutex = threading.Lock()
        self._logged_at, self._paused_until = -LOG_PERIOD_S, 0.0
        self._full_bytes, self._full_until = 0, 0.0  # how much there was when the disk was full
        try:
            self._lock = _take_lock(self._root)
        except BlockingIOError as error:
            raise ConfigError(
                f"disk_cache {options.folder} is in use by another server; give each a folder of its own",
                param="disk_cache"
            ) from error
        except OSError as error:
            raise ConfigError(f"disk_cache {options.folder} cannot be used: {error}", param="disk_cache") from error
        if options.place == 0:
            self._remove_orphans(options)
        self._scan()

    def exists(self, names: list[str]) -> list[bool]:
        """See `PageStore`."""
        with self._mutex:
            return [name in self._files for name in names]

    def get(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        if not self._holds_folder():
            return [False] * len(names)
        return [self._read(name, buffer) for name, buffer in zip(names, buffers, strict=True)]

    def put(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        if not self._holds_folder():
            return [False] * len(names)
        return [self._write(name, buffer) for name, buffer in zip(names, buffers, strict=True)]

    def close(self) -> None:
        """See `PageStore`."""
        self._lock.close()

    def _holds_folder(self) -> bool:
        """Whether the folder is still ours: who deletes it deletes the lock too, and then another server may take it.
        Takes it again if nobody has."""
        with self._mutex:
            with contextlib.suppress(OSError):
                if os.path.samestat((self._root / LOCK).stat(), os.fstat(self._lock.fileno())):
                    return True
            if time.monotonic() < self._paused_until:
                return False
            try:
                lock = _take_lock(self._root)
            except OSError as error:
                self._paused_until = time.monotonic() + PAUSE_S
                is_taken = isinstance(error, BlockingIOError)
                reason = "was deleted and is in use by another server now" if is_taken else f"cannot be used: {error}"
                self._complain(f"{self._root} {reason}; nothing is read from it or written to it")
                return False
            self._lock.close()
            self._lock = lock
            self._files.clear()
            self._num_bytes = self._num_writing
            self._scan()
            return True

    def _path(self, name: str) -> Path:
        # ``name`` ends with the page's key: spread files over folders
        return self._root / name[-2:] / f"{name}{SUFFIX}"

    def _read(self, name: str, buffer: memoryview) -> bool:
        with self._mutex:
            if name not in self._files:
                return False
            self._files.move_to_end(name)
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                magic, version, crc, size = _HEADER.unpack(file.read(_HEADER.size))
                is_ours = (magic, version, size) == (FORMAT, VERSION, len(buffer))
                if is_ours and _fill(file.fileno(), buffer) == size and _checksum(name, buffer) == crc:
                    with contextlib.suppress(OSError):
                        os.utime(path)  # last use, for the next start
                    return True
            self._complain(f"{path} is corrupt and is removed")
        except (OSError, struct.error) as error:
            if not isinstance(error, FileNotFoundError):  # deleted by someone, which is allowed
                self._complain(f"{path} cannot be read: {error}")
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                return False
        self._forget(name)
        return False

    def _write(self, name: str, buffer: memoryview) -> bool:
        size = _HEADER.size + len(buffer)
        with self._mutex:
            if name in self._files:
                self._files.move_to_end(name)
                return True
            if self._num_writing + size > self._capacity or time.monotonic() < self._paused_until:
                return False
            victims = []
            is_full = time.monotonic() < self._full_until
            room = min(self._capacity, self._full_bytes) if is_full else self._capacity
            while self._num_bytes + size > room and self._files:
                victim, taken = self._files.popitem(last=False)
                self._num_bytes -= taken
                victims.append((victim, taken))
            self._num_bytes += size
            self._num_writing += size
        path = self._path(name)
        partial = path.with_suffix(f".{threading.get_ident()}.part")
        try:
            while victims:
                with contextlib.suppress(IsADirectoryError):  # by somebody else
                    self._path(victims[0][0]).unlink(missing_ok=True)
                del victims[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb", buffering=0) as file:
                header = _HEADER.pack(FORMAT, VERSION, _checksum(name, buffer), len(buffer))
                if os.writev(file.fileno(), [header, buffer]) != size:
                    raise OSError(errno.ENOSPC, "the disk is full")
            partial.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            with self._mutex:
                self._num_bytes -= size
                self._num_writing -= size
                for victim, taken in reversed(victims):  # still there
                    self._num_bytes += taken - self._files.pop(victim, 0)
                    self._files[victim] = taken
                    self._files.move_to_end(victim, last=False)
                self._paused_until = time.monotonic() + PAUSE_S
                if error.errno in FULL:
                    self._full_bytes, self._full_until = self._num_bytes, time.monotonic() + FULL_S
            self._complain(f"{path} cannot be written, and the page is not kept: {error}")
            return False
        with self._mutex:
            self._num_writing -= size
            if name in self._files:  # written by two threads at once
                self._num_bytes -= size
            self._files[name] = size
        return True

    def _forget(self, name: str) -> None:
        with self._mutex:
            self._num_bytes -= self._files.pop(name, 0)
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _scan(self) -> None:
        """Take over the files of earlier runs, those of other models too: by last use, and no more than fit."""
        found = []
        for path in self._root.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix == SUFFIX:
                    found.append((status.st_mtime_ns, path.name.removesuffix(SUFFIX), status.st_size))
                else:  # left by a process that was killed
                    path.unlink()
        for _, name, size in sorted(found):
            self._files[name] = size
            self._num_bytes += size
        while self._num_bytes > self._capacity and self._files:
            name, size = self._files.popitem(last=False)
            self._num_bytes -= size
            with contextlib.suppress(OSError):
                self._path(name).unlink(missing_ok=True)

    def _remove_orphans(self, options: StoreOptions) -> None:
        """Places that no process of this server has, from a run with more of them."""
        assert options.folder is not None
        for path in options.folder.glob("place-*"):
            number = path.name.removeprefix("place-")
            if number.isdigit() and int(number) >= options.num_places:
                shutil.rmtree(path, ignore_errors=True)

    def _complain(self, text: str) -> None:
        """One line a minute."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_PERIOD_S:
            self._logged_at = now
            logger.warning("disk cache: %s", text)


def _checksum(name: str, page: memoryview) -> int:
    return zlib.crc32(page, zlib.crc32(name.encode()))


def _take_lock(folder: Path) -> IO[str]:
    """Lock a folder, which is made if need be, for as long as the file is open. Raises `BlockingIOError` when another
    process has, `OSError` for a folder that cannot be used."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def _fill(descriptor: int, buffer: memoryview) -> int:
    """Read into the whole buffer; returns how much came, less at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.readv(descriptor, [buffer[done:]])
        if count == 0:
            break
        done += count
    return done
