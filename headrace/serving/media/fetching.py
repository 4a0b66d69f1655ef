"""`Fetcher`: media over http and https, bounded in time, size and number, with every redirect checked like the first
address. Refuses: decoding, and any address that `addresses` does not allow.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin

from headrace.base import VERSION
from headrace.base.errors import MediaError, QueueFull
from headrace.base.media_config import MediaConfig
from headrace.serving.http_client import BrokenExchange, HttpClient, HttpResponse, RawHeaders
from headrace.serving.media.addresses import find_addresses, split_url

MOST_AT_ONCE = 16
MOST_WAITING = 256
MAX_REDIRECTS = 4
REDIRECTS = frozenset({301, 302, 303, 307, 308})


class TooLarge(ValueError):
    """The body is longer than it may be."""


@dataclass
class _BoundedResponse(HttpResponse):
    """A response of at most ``most`` bytes."""

    most: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    is_too_large: bool = False
    _num_taken: int = 0

    def begin(self, status: int, headers: RawHeaders) -> None:
        """See `ResponseSink`."""
        super().begin(status, headers)
        self.headers = dict(headers)

    def take(self, now: float, piece: bytes) -> None:
        """See `ResponseSink`."""
        self._num_taken += len(piece)
        declared = self.headers.get(b"content-length", b"0")
        if self._num_taken > self.most or (declared.isdigit() and int(declared[:20]) > self.most):
            self.is_too_large = True
            raise TooLarge
        self.pieces.append((now, piece))  # `HttpResponse` has a bound of its own, which may be lower


class Fetcher:
    """Fetches for one process; used by one event loop."""

    def __init__(self, config: MediaConfig):
        self._config, self._hosts = config, config.hosts
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._num_waiting = 0
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, param: str) -> bytes:
        """The body that a URL leads to. ``param`` names the URL's place in the request. Raises `MediaError`, and
        `QueueFull` while too many others wait."""
        if self._num_waiting >= MOST_WAITING:
            raise _too_many(param)
        timeout_s, has_begun = self._config.media_timeout_s, False
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s), self._slots:
                has_begun = True
                return await self._follow(url, param)
        except TimeoutError:
            if not has_begun:  # slow hosts of others take all the slots: nothing is wrong with this one
                raise _too_many(param) from None
            raise MediaError(f"{param}: fetching it took more than {timeout_s:g} seconds", param=param) from None
        finally:
            self._num_waiting -= 1

    async def _follow(self, url: str, param: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts = split_url(url, param)
            response = await self._get(parts, param)
            if response.status not in REDIRECTS:
                return self._body_of(response, param)
            target = response.headers.get(b"location", b"").decode("latin-1")
            if not target:
                raise MediaError(f"{param}: the host answered with a redirect to nowhere", param=param)
            try:
                url = urljoin(url, target)
            except ValueError:
                raise MediaError(f"{param}: the host answered with a redirect to no URL", param=param) from None
        raise MediaError(f"{param}: more than {MAX_REDIRECTS} redirects", param=param)

    async def _get(self, parts: SplitResult, param: str) -> _BoundedResponse:
        addresses = await find_addresses(parts, self._hosts, param)
        if parts.scheme == "https" and self._tls is None:  # reads the system's certificates: some ten milliseconds
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        failure = ""
        for address in addresses:
            client = HttpClient(f"{parts.scheme}://{parts.netloc}", address=address, tls=self._tls)
            response = _BoundedResponse(most=self._config.max_bytes)
            try:
                await client.send(
                    "GET", target, response=response,
                    headers={
                        "User-Agent": f"headrace/{VERSION}", "Accept-Encoding": "identity", "Connection": "close"
                    },
                )
                return response
            except TooLarge:
                return response
            except ssl.SSLCertVerificationError as error:
                raise MediaError(
                    f"{param}: the host's certificate is not valid: {error.verify_message}", param=param
                ) from None
            except TimeoutError:  # of the whole fetch: an `OSError`, too
                raise
            except (OSError, BrokenExchange) as error:
                failure = type(error).__name__
            finally:
                client.close()
        raise MediaError(f"{param}: the host cannot be reached ({failure})", param=param)

    def _body_of(self, response: _BoundedResponse, param: str) -> bytes:
        if response.status != 200:
            raise MediaError(f"{param}: the host answered with status {response.status}", param=param)
        if response.is_too_large:
            raise MediaError(
                f"{param}: it is larger than {self._config.media_max_mib} MiB (--media-max-mib)", param=param
            )
        if response.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise MediaError(f"{param}: the host sent it compressed, which was not asked for", param=param)
        return response.body


def _too_many(param: str) -> QueueFull:
    return QueueFull("too many media are being fetched; try again", param=param, retry_after=1.0)
