"""Where workers are found while the router runs: in a file, or by DNS."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.serving.router.fleet import Fleet, full_url

logger = logging.getLogger(__name__)

FILE_POLL_S, DNS_POLL_S = 1.0, 5.0
MAX_FILE_BYTES = 1 << 20


def read_workers(path: Path) -> list[str]:
    """The URLs of a file, one per line; empty lines and those that begin with # are skipped. Raises `OSError`."""
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    lines = (line.strip() for line in text.splitlines())
    return [full_url(line) for line in lines if line and not line.startswith("#")]


class WorkersFile:
    """A file of workers, for a fleet. New ones are used as soon as it has them. One that it has no longer is drained
    when the file has stayed the same from one `poll` to the next: it may be in the middle of being written."""

    def __init__(self, path: Path, fleet: Fleet):
        self._path, self._fleet = path, fleet
        self._stamp: tuple[int, int] | None = None
        self._used: list[str] = []
        self._is_settled = self._is_missing = False

    def poll(self) -> None:
        """Use the workers of the file. While it cannot be read, those that are known stay."""
        try:
            status = self._path.stat()
            stamp = status.st_mtime_ns, status.st_size
            if self._is_settled and stamp == self._stamp:
                return
            is_settled, urls = stamp == self._stamp, read_workers(self._path)
            used = urls if is_settled else [*urls, *(url for url in self._used if url not in urls)]
            self._fleet.replace(used, self._used)
        except OSError as error:
            if not self._is_missing:
                logger.warning("workers_file %s: %s; workers stay as they are", self._path, error.strerror or error)
            self._is_missing = True
            return
        self._is_missing, self._is_settled, self._stamp, self._used = False, is_settled, stamp, used


async def watch_file(path: Path, fleet: Fleet) -> None:
    """Use the workers of a file, now and whenever it changes."""
    file = WorkersFile(path, fleet)
    while True:
        file.poll()
        await asyncio.sleep(FILE_POLL_S)


def split_name(name: str) -> tuple[str, int]:
    """``name:port``; raises `ConfigError`."""
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"workers_dns must be NAME:PORT, such as engines.default.svc:8000; got {name!r}",
                          param="workers_dns")
    return host.strip("[]"), int(port)


async def watch_name(name: str, fleet: Fleet) -> None:
    """Use the addresses of a name as workers, now and whenever they change. While it cannot be resolved, those that are
    known stay."""
    host, port = split_name(name)
    loop = asyncio.get_running_loop()
    found: Sequence[str] = ()
    is_missing = False
    while True:
        try:
            answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = sorted({str(answer[4][0]) for answer in answers})
            urls = [f"http://[{a}]:{port}" if ":" in a else f"http://{a}:{port}" for a in addresses]
            fleet.replace(urls, found)
            found, is_missing = urls, False
        except (OSError, UnicodeError) as error:  # the second: no name by IDNA's rules
            if not is_missing:
                reason = getattr(error, "strerror", None) or error
                logger.warning("workers_dns %s: %s; workers stay as they are", name, reason)
            is_missing = True
        await asyncio.sleep(DNS_POLL_S)
