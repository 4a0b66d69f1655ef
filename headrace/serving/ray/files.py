"""Files of a batch on many replicas: JSON lines and Parquet, read as lines of OpenAI's batch format and written as
parts. Refuses: what a line means (``serving/batch.py``). ``pyarrow`` is imported for Parquet alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import ConfigError
from headrace.serving.batch import read_lines

JSONL, PARQUET = "jsonl", "parquet"
SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET}
COLUMNS = ("custom_id", "method", "url", "body")
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Source:
    """The input: files of one format in the order in which their lines are numbered, from 1."""

    files: tuple[Path, ...]
    format: str

    @classmethod
    def find(cls, path: Path) -> Source:
        """The file ``path``, or the files of a folder by name. Raises `ConfigError` if there is none, or if the formats
        differ."""
        if not path.exists():
            raise ConfigError(f"cannot read {path}: No such file or directory", param="input")
        files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path} has no files named {', '.join(SUFFIXES)}", param="input")
        formats = {SUFFIXES.get(file.suffix, JSONL) for file in files}
        if len(formats) > 1:
            raise ConfigError(f"{path} has files of several formats; give a folder of one", param="input")
        return cls(tuple(files), formats.pop())

    def describe(self) -> list[list[str | int]]:
        """Name and size in bytes of each file: what a run that is continued must find again."""
        return [[file.name, file.stat().st_size] for file in self.files]

    def count(self) -> int:
        """The number of lines that are not empty. Raises `ConfigError` for a file that cannot be read."""
        return sum(self._count(file) for file in self.files)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of each line that is not empty, read as they are taken."""
        for number, text in enumerate(chain.from_iterable(map(self._read, self.files)), 1):
            if text.strip():
                yield number, text

    def _count(self, file: Path) -> int:
        try:
            if self.format == PARQUET:
                return int(_open_table(file).metadata.num_rows)
            with file.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror or error}", param="input") from error

    def _read(self, file: Path) -> Iterator[bytes]:
        if self.format == PARQUET:
            yield from _read_rows(file)
            return
        with file.open("rb") as lines:
            yield from read_lines(lines)


def require_pyarrow() -> None:
    """Raise `ConfigError` where Parquet cannot be read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"Parquet needs pyarrow ({error}): pip install 'headrace[ray]'", param="input") from error


def _open_table(file: Path) -> Any:
    require_pyarrow()
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file} is no Parquet file: {error}", param="input") from error
    missing = {"custom_id", "url", "body"} - set(table.schema_arrow.names)
    if missing:
        raise ConfigError(
            f"{file} lacks the columns {', '.join(sorted(missing))}; a batch has custom_id, url and body (a struct, or "
            "JSON as text)", param="input"
        )
    return table


def _read_rows(file: Path) -> Iterator[bytes]:
    """Each row as a line of JSON. A null field of a struct is a field that the row does not have."""
    table = _open_table(file)
    columns = [name for name in COLUMNS if name in table.schema_arrow.names]
    for rows in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
        for row in rows.to_pylist():
            # bytes and dates have no place in a request: as text, which the check of the line refuses where it must
            yield msgspec.json.encode(_without_nulls({**row, "body": _read_body(row["body"])}), enc_hook=str)


def _read_body(body: Any) -> Any:
    """A body in JSON as an object; what is none stays as it is, and the check of the line says so."""
    try:
        return msgspec.json.decode(body) if isinstance(body, str | bytes) else body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def write_part(path: Path, records: bytes, file_format: str) -> None:
    """Write the records of a shard (JSON lines) so that ``path`` has all of them or is not there. Raises `ConfigError`
    where it cannot be written."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        if file_format == PARQUET:
            _write_table(unfinished, records)
        else:
            unfinished.write_bytes(records)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}", param="output") from error


def _write_table(path: Path, records: bytes) -> None:
    """Columns ``id``, ``custom_id``, ``response`` (``status_code``, ``request_id``, and ``body`` as JSON), and
    ``error`` as JSON: bodies differ by route, and a column has one type."""
    import pyarrow
    from pyarrow import parquet

    text, number = pyarrow.string(), pyarrow.int32()
    response = pyarrow.struct([("status_code", number), ("request_id", text), ("body", text)])
    schema = pyarrow.schema([("id", text), ("custom_id", text), ("response", response), ("error", text)])
    rows = [msgspec.json.decode(line) for line in records.splitlines()]
    for row in rows:
        if row["response"] is not None:
            row["response"]["body"] = msgspec.json.encode(row["response"]["body"]).decode()
        if row["error"] is not None:
            row["error"] = msgspec.json.encode(row["error"]).decode()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
