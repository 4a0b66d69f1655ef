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


async def watch_file(path: Path, fleet: Fleet) -> None:
    """Use the workers of a file, now and whenever it changes. While it cannot be read, those that are known stay."""
    stamp: tuple[int, int] | None = None
    found: Sequence[str] = ()
    is_missing = False
    while True:
        try:
            status = path.stat()
            if (status.st_mtime_ns, status.st_size) != stamp:
                urls = read_workers(path)
                fleet.replace(urls, found)
                stamp, found = (status.st_mtime_ns, status.st_size), urls
            is_missing = False
        except OSError as error:
            if not is_missing:
                logger.warning("workers_file %s: %s; workers stay as they are", path, error.strerror or error)
            is_missing = True
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
