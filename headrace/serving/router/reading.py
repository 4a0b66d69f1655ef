"""`RequestReader`: bytes of a connection to requests. Refuses: sockets, time, and the size of bodies
(``client_connection.py``)."""

from __future__ import annotations

from collections import deque
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from headrace.serving.http.transport.connection import (
    MAX_HEAD_BYTES,
    NOT_HTTP,
    TOO_LONG,
    MessageBounds,
    describe_refusal,
)
from headrace.serving.http_client import RawHeaders
from headrace.serving.router.client_request import ClientRequest, Wire

NO_DATA = 400, f"more than {MAX_HEAD_BYTES} bytes of a body are no data of it"


class RequestReader:
    """Appends requests to ``requests`` when their heads have come, and adds to the body of the last one. ``refusal`` is
    the response to what is no request; with it, and after the last request of the connection, nothing is read any more
    (``is_over``). httptools calls the ``on_`` methods from `feed_data`; they only note what has come."""

    def __init__(self, wire: Wire, client: tuple[str, int] | None):
        self.requests: deque[ClientRequest] = deque()
        self.refusal, self.is_over = b"", False
        self.has_partial_head = False
        self.client = client
        self._wire = wire
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request with `Connection: close` is no reason not to answer it.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._bounds = MessageBounds()
        self._url = b""
        self._headers: RawHeaders = []

    def feed(self, data: bytes) -> None:
        """Read what has come."""
        admitted = self._bounds.admit(data)
        if admitted is None:
            self._refuse(TOO_LONG)
            return
        last = self.requests[-1] if self.requests else None
        num_parts = 0 if last is None else len(last.parts)
        self._parse(admitted)
        if self._bounds.is_exceeded and not self.is_over:
            self._refuse(TOO_LONG if self._bounds.is_in_head else NO_DATA)
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
        if self._bounds.is_in_head:  # not of a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_partial_head = False
        self._bounds.note_content()
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
        self._bounds.note_content()
        if not self.is_over:
            request = self.requests[-1]
            request.num_bytes += len(piece)
            if not request.is_ended:
                request.parts.append(piece)

    def on_message_complete(self) -> None:
        self._bounds.note_end()
        if not self.is_over:
            request = self.requests[-1]
            request.is_whole, self.is_over = True, not request.keeps_alive

    def _refuse(self, refusal: tuple[int, str]) -> None:
        self.is_over, self.refusal = True, describe_refusal(*refusal)
