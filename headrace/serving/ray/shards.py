"""Shards of a batch, and what is known of them on disk, so that an interrupted run goes on. A shard is a run of
consecutive lines and is done as a whole: it has its records in a part and its entry in the manifest, or it is done
again. Refuses: running them (``pool.py``)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.base.errors import ConfigError
from headrace.serving.batch import Item, read_line
from headrace.serving.ray.files import Source, write_part

SHARD_BYTES = 16 << 20
"""A shard ends after this many bytes of text, however few its lines: shards in progress are kept in memory."""
MANIFEST = "manifest.jsonl"


class StoredIds:
    """The ids of earlier lines in a temporary database on disk: millions of them do not fit into bounded memory."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def __contains__(self, custom_id: object, /) -> bool:
        return self._database.execute("SELECT 1 FROM ids WHERE id = ?", (custom_id,)).fetchone() is not None

    def add(self, custom_id: str, /) -> None:
        """Keep an id."""
        self._database.execute("INSERT OR IGNORE INTO ids VALUES (?)", (custom_id,))

    def close(self) -> None:
        """Delete the database."""
        self._database.close()


@dataclass(frozen=True)
class Shard:
    """Consecutive lines of the input. ``number`` counts from 0."""

    number: int
    items: list[Item]


def read_shards(source: Source, size: int, completed: set[int]) -> Iterator[Shard]:
    """The shards of at most ``size`` lines that are not in ``completed``, read as they are taken. Lines of completed
    shards are read, too: an id that they have is taken."""
    with contextlib.closing(StoredIds()) as seen:
        items: list[Item] = []
        number = num_bytes = 0
        for line_number, text in source.lines():
            items.append(read_line(line_number, text, seen))
            num_bytes += len(text)
            if len(items) == size or num_bytes >= SHARD_BYTES:
                if number not in completed:
                    yield Shard(number, items)
                items, num_bytes, number = [], 0, number + 1
        if items and number not in completed:
            yield Shard(number, items)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a manifest: what is run, and how it is cut. ``input`` has names and sizes of the files."""

    input: list[tuple[str, int]]
    num_lines: int
    shard_size: int
    output_format: str
    version: int = 1


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a manifest for a shard that is done: the ``file`` of its ``num_records`` records, of which
    ``num_failed`` have an error."""

    shard: int
    file: str
    num_records: int
    num_failed: int


class Manifest:
    """The output folder of a batch: ``manifest.jsonl`` and a part for each shard that is done. One process writes it at
    a time. ``plan`` is the one with which the run began, ``entries`` are the shards that are done, by number."""

    def __init__(self, folder: Path, plan: Plan):
        self._folder = folder
        self.entries: dict[int, Entry] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / MANIFEST).open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write {folder}: {error.strerror}", param="output") from error
        with contextlib.ExitStack() as undo:
            undo.callback(self._file.close)
            self._lock()
            self.plan = self._read(plan)
            undo.pop_all()

    def close(self) -> None:
        """Let another run continue."""
        self._file.close()

    def save(self, shard: int, records: bytes, num_failed: int) -> None:
        """Write the records (JSON lines) of a shard and note it as done."""
        name = f"part-{shard:06d}.{self.plan.output_format}"
        write_part(self._folder / name, records, self.plan.output_format)
        entry = Entry(shard=shard, file=name, num_records=records.count(b"\n"), num_failed=num_failed)
        self._append(entry)
        self.entries[shard] = entry

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another run writes to {self._folder}; wait for its end", param="output") from error

    def _append(self, line: Plan | Entry) -> None:
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(f"cannot write {self._folder / MANIFEST}: {error.strerror}", param="output") from error

    def _read(self, plan: Plan) -> Plan:
        """The plan of the manifest, after a check that it is of the same input; with none, ``plan`` is written."""
        lines = _complete_lines(self._file)
        if not lines:
            if any(self._folder.glob("part-*")):
                raise ConfigError(f"{self._folder} has parts without a manifest; choose another output", param="output")
            self._append(plan)
            return plan
        try:
            stored = msgspec.json.decode(lines[0], type=Plan)
            entries = [msgspec.json.decode(line, type=Entry) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._folder / MANIFEST} is not the manifest of a batch ({error}); choose another output",
                param="output"
            ) from error
        if (stored.input, stored.version) != (plan.input, plan.version):
            raise ConfigError(
                f"{self._folder} has the results of another input: {_names(stored)}, not {_names(plan)}; choose "
                "another output", param="output"
            )
        self.entries = {entry.shard: entry for entry in entries if (self._folder / entry.file).exists()}
        return stored


def _complete_lines(file: BinaryIO) -> list[bytes]:
    """The lines of a manifest; one that a run was interrupted in is cut off."""
    file.seek(0)
    lines = file.read().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        file.truncate(sum(len(line) for line in lines[:-1]))
        lines.pop()
    file.seek(0, os.SEEK_END)
    return lines


def _names(plan: Plan) -> str:
    return ", ".join(f"{name} ({size} bytes)" for name, size in plan.input[:3]) + (", …" if plan.input[3:] else "")
