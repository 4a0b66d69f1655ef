"""A folder of recorded requests: JSON lines in files that are begun anew as they grow; the oldest go when all have
grown.

Refuses: keys; no header is written. Texts of users are: the folder and its files are for their owner's eyes alone.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import msgspec

from headrace.base.errors import ConfigError
from headrace.serving.http.recording import Exchange

logger = logging.getLogger(__name__)

NAME = "requests-*.jsonl"
NUM_FILES = 8
"""Into how many files the limit is divided: this share of the records goes at a time."""

MAX_PENDING = 64 * 2**20
"""Bytes of requests and answers that wait for a slow disk; what comes above is left out."""

MAX_LINE = 64 * 2**20


NO_BODY = msgspec.Raw(b"null")


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. ``at`` is by the wall clock; ``seconds`` passed to the end of the answer, ``first_byte_s`` to its
    beginning. ``answer`` is its text, events and all. Without a ``body`` the request was too large to keep, or no
    JSON."""

    at: float
    path: str
    body: msgspec.Raw = NO_BODY
    status: int = 0
    answer: str = ""
    seconds: float = 0.0
    first_byte_s: float = 0.0
    request_id: str = "-"
    is_answer_cut: bool = False
    is_complete: bool = True

    @property
    def has_body(self) -> bool:
        """Whether it can be sent again."""
        return bytes(self.body) != bytes(NO_BODY)


class DumpFolder:
    """Writes exchanges on a thread of its own. ``limit`` is in bytes."""

    def __init__(self, folder: str, limit: int):
        self._folder, self._limit = Path(folder), limit
        self._writer = ThreadPoolExecutor(1, "request-dump")
        self._file: FileIO | None = None
        self._lock = threading.Lock()
        self._num_pending = self._num_left_out = 0
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"dump_requests: cannot write to {folder}: {error.strerror}", param="dump_requests"
            ) from error

    def take(self, exchange: Exchange) -> None:
        """Write one, soon."""
        if self._num_pending > MAX_PENDING:
            self._num_left_out += 1
            if self._num_left_out == 1:
                logger.warning("requests come faster than they can be written to the dump; some are left out")
            return
        self._count(exchange.num_bytes)
        self._writer.submit(self._write, exchange)

    def close(self) -> None:
        """Write what waits, then close."""
        self._writer.shutdown(wait=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, exchange: Exchange) -> None:
        try:
            if self._file is None or self._file.tell() >= self._limit // NUM_FILES:
                self._open()
            self._append(msgspec.json.encode(_record(exchange)) + b"\n")
        except OSError as error:
            logger.error("a request cannot be written to the dump: %s", error)
        finally:
            self._count(-exchange.num_bytes)

    def _append(self, line: bytes) -> None:
        """All of a line or, on a full disk, nothing of it."""
        assert self._file is not None
        begin = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) < len(line):
            self._file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_pending += num_bytes

    def _open(self) -> None:
        """Begin a new file; give up the oldest ones when there is no room for another."""
        if self._file is not None:
            self._file.close()
        files = sorted(self._folder.glob(NAME))
        sizes = {path: path.stat().st_size for path in files}
        while files and sum(sizes.values()) > self._limit - self._limit // NUM_FILES:
            oldest = files.pop(0)
            oldest.unlink()
            del sizes[oldest]
        seconds, rest = divmod(time.time_ns(), 10**9)
        # sorts by time
        name = f"requests-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(seconds))}-{rest:09d}-{os.getpid()}.jsonl"
        self._file = os.fdopen(
            os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0
        )


def _record(exchange: Exchange) -> Record:
    return Record(
        at=exchange.at, path=exchange.path, body=_as_json(exchange), status=exchange.status,
        answer=exchange.answer.decode(errors="replace"),
        seconds=round(exchange.seconds, 6), first_byte_s=round(exchange.first_byte_s, 6),
        request_id=exchange.request_id,
        is_answer_cut=exchange.is_answer_cut, is_complete=exchange.is_complete,
    )


def _as_json(exchange: Exchange) -> msgspec.Raw:
    if exchange.is_body_cut:
        return NO_BODY
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(bytes(exchange.body))))  # on one line, and valid
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_BODY


def read_records(folder: str) -> list[Record]:
    """All records of a folder, or of one file, in the order in which the requests came. Lines that cannot be read, such
    as the last one of a server that was killed, are left out with a warning. Raises `ConfigError` when there are
    none."""
    path = Path(folder)
    files = sorted(path.glob(NAME)) if path.is_dir() else [path]
    try:
        records = [record for file in files for record in _read_file(file)]
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}") from error
    if not records:
        raise ConfigError(f"{folder} holds no recorded requests; a server writes them with --dump-requests")
    return sorted(records, key=lambda record: record.at)


def _read_file(path: Path) -> Iterator[Record]:
    decode = msgspec.json.Decoder(Record).decode
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            try:
                yield decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("%s line %d is left out: %s", path.name, number, error)
