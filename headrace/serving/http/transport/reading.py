"""`RequestReader`: bytes of a connection to requests. Refuses: sockets, time, and the size of bodies
(``connection.py``)."""

from __future__ import annotations

import re
from collections import deque
from http import HTTPStatus
from urllib.parse import unquote

import httptools
import msgspec
from starlette.types import Scope

from headrace.base.errors import RequestError
from headrace.serving.http.protocol.errors import describe_error
from headrace.serving.http.transport.client_request import ClientRequest, Wire
from headrace.serving.http_client import RawHeaders

MAX_HEAD_BYTES = 64 * 1024
END_OF_HEAD = b"\r\n\r\n"
UPGRADE = re.compile(rb"\r\n(?i:upgrade):[^\r\n]*")
NOT_HTTP = 400, "not a valid HTTP/1.1 request"
TOO_LONG = 431, f"the request line and headers have more than {MAX_HEAD_BYTES} bytes"
NO_DATA = 400, f"more than {MAX_HEAD_BYTES} bytes of a body are no data of it"


def describe_refusal(status: int, message: str) -> bytes:
    """The whole response (head and body) to bytes that are not a valid request. In OpenAI's form: no path is known
    that could select another API's."""
    error = RequestError(message)
    error.status = status
    body = msgspec.json.encode(describe_error(error))
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class RequestReader:
    """Appends requests to ``requests`` when their heads have come, and adds to the body of the last one. ``refusal`` is
    the response to what is no request; with it, and after the last request of the connection, nothing is read any more
    (``is_over``). httptools calls the ``on_`` methods from `feed_data`; they only note what has come.

    ``Upgrade`` is removed from a head that comes in one piece: the parser drops the body of such requests, and Java's
    HTTP client offers HTTP/2 with every request."""

    def __init__(self, wire: Wire, client: tuple[str, int] | None):
        self.requests: deque[ClientRequest] = deque()
        self.refusal, self.is_over = b"", False
        self.has_partial_head = False
        self._num_head_bytes = 0
        self._num_bare = 0  # bytes since the last of a body: the parser keeps a line of a trailer, however long
        self.client = client
        self._wire = wire
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request with `Connection: close` is no reason not to answer it.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_in_head = True
        self._url = b""
        self._headers: RawHeaders = []

    def feed(self, data: bytes) -> None:
        """Read what has come."""
        if self._is_in_head:
            # Checked before the parser, which would buffer a head of any size; -1 while it is incomplete.
            end = data.find(END_OF_HEAD)
            if self._num_head_bytes + end > MAX_HEAD_BYTES:
                self._refuse(TOO_LONG)
                return
            # Only when the whole head is in this piece: a line may be split between two pieces.
            if end > 0 and not self._num_head_bytes and b"\r\nupgrade:" in data[:end].lower():
                data = UPGRADE.sub(b"", data[:end]) + data[end:]
            self._num_head_bytes += len(data)
        last = self.requests[-1] if self.requests else None
        num_parts = 0 if last is None else len(last.parts)
        self._num_bare += len(data)
        self._parse(data)
        num_kept = self._num_head_bytes if self._is_in_head else self._num_bare
        if num_kept > MAX_HEAD_BYTES and not self.is_over:
            self._refuse(TOO_LONG if self._is_in_head else NO_DATA)
        if self.requests:
            self.requests[-1].join_parts(num_parts if self.requests[-1] is last else 0)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # one that was not removed, or CONNECT: nobody knows what follows
            if not self.is_over:
                self.is_over, self.requests[-1].keeps_alive = True, False
        except httptools.HttpParserError:
            if not self.is_over:
                self._refuse(NOT_HTTP)

    def on_message_begin(self) -> None:
        self.has_partial_head = True
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # not of a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = self.has_partial_head = False
        self._num_bare = 0
        if self.is_over:
            return
        version, url = self._parser.get_http_version(), httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        scope: Scope = {
            "type": "http", "http_version": version, "method": self._parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path, "raw_path": url.path, "query_string": url.query or b"",
            "headers": self._headers, "client": self.client, "scheme": "http",
        }
        keeps_alive = version == "1.1" and self._parser.should_keep_alive()
        self.requests.append(ClientRequest(self._wire, scope, keeps_alive=keeps_alive))

    def on_body(self, piece: bytes) -> None:
        self._num_bare = 0
        if not self.is_over:
            request = self.requests[-1]
            request.num_bytes += len(piece)
            if not request.is_ended:
                request.parts.append(piece)

    def on_message_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        if not self.is_over:
            request = self.requests[-1]
            request.is_whole, self.is_over = True, not request.keeps_alive

    def _refuse(self, refusal: tuple[int, str]) -> None:
        self.is_over, self.refusal = True, describe_refusal(*refusal)
