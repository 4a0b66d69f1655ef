"""`RequestReader` against h11, another parser: requests that are cut anywhere, follow one another, or are damaged."""

from __future__ import annotations

from typing import Any

import h11
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.http.transport.client_request import ClientRequest
from headrace.serving.http.transport.reading import RequestReader

Found = tuple[str, bytes, list[tuple[bytes, bytes]], bytes]
"""A complete request: method, target, headers, body."""

TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=8).map(lambda name: f"x-{name}".encode())
VALUES = st.text("!~ \tabc:,;=\"\\\xe9", max_size=12).map(lambda value: value.strip(" \t").encode("latin-1"))
BODIES = st.one_of(st.just(b""), st.binary(max_size=40), st.just(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"))


@st.composite
def whole_requests(draw: st.DrawFn) -> bytes:
    """The bytes of a request, in one of the framings of RFC 9112, section 6."""
    method = draw(st.sampled_from(["GET", "POST", "DELETE", "HEAD", "OPTIONS"]))
    target = draw(st.sampled_from(["/", "/v1/completions", "/v1/x?a=b%20c", "/%41?x"]))
    lines = [f"{method} {target} HTTP/1.1".encode(), b"host: a"]
    lines += [b"%b:%b%b" % (name, draw(st.sampled_from([b"", b" ", b"\t "])), value)
              for name, value in draw(st.lists(st.tuples(TOKENS, VALUES), max_size=3))]
    body, framing = draw(BODIES), draw(st.sampled_from(["length", "chunks", "none"]))
    if framing == "chunks":
        cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
        pieces = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        last = draw(st.sampled_from([b"0\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n"]))
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + last
        lines.append(b"transfer-encoding: chunked")
    elif framing == "length":
        lines.append(b"content-length: %d" % len(body))
    else:
        body = b""
    return b"\r\n".join([*lines, b"", b""]) + body


@st.composite
def cut(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    """The bytes in pieces, none of which is empty."""
    if len(whole) < 200 and draw(st.booleans()):
        return [bytes([byte]) for byte in whole]
    cuts = sorted(set(draw(st.lists(st.integers(0, len(whole)), max_size=8))))
    return [piece for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True) if (piece := whole[begin:end])]


class NoWire:
    """The connection of requests that nobody answers."""

    front: Any = None
    transport: Any = None
    is_paused = False

    def default_lines(self) -> bytes:
        return b""

    def note_progress(self) -> None:
        raise AssertionError("nothing was answered")


def read(pieces: list[bytes]) -> tuple[list[Found], bool]:
    """The complete requests, and whether what follows was refused."""
    reader = RequestReader(NoWire(), ("127.0.0.1", 1))
    for piece in pieces:
        if not reader.is_over:
            reader.feed(piece)

    def found(request: ClientRequest) -> Found:
        scope = request.scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        assert sum(map(len, request.parts)) == request.num_bytes
        headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]  # of no meaning, and kept or not
        return scope["method"], target, headers, request.take_body()

    assert all(request.is_whole for request in list(reader.requests)[:-1])
    return [found(request) for request in reader.requests if request.is_whole], bool(reader.refusal)


def read_by_h11(whole: bytes) -> tuple[list[Found], bool]:
    """The same by h11."""
    connection, requests = h11.Connection(h11.SERVER), []
    connection.receive_data(whole)
    request, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                headers = [(bytes(name), bytes(value)) for name, value in request.headers]
                requests.append((request.method.decode(), bytes(request.target), headers, body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return requests, False
                connection.start_next_cycle()
            else:
                return requests, False
    except h11.RemoteProtocolError:
        return requests, True


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_requests_are_those_of_another_parser_however_they_are_cut(data: st.DataObject):
    whole = b"".join(data.draw(st.lists(whole_requests(), min_size=1, max_size=4)))
    expected, is_refused = read_by_h11(whole)
    assert read(data.draw(cut(whole))) == (expected, is_refused) == (expected, False)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_requests_have_no_second_meaning(data: st.DataObject):
    """Cuts change nothing, nothing but a refusal comes of damage, and what both parsers take for a request is the same
    one: a body that ends elsewhere would let a client smuggle requests (RFC 9112, section 11.2)."""
    whole = bytearray(b"".join(data.draw(st.lists(whole_requests(), min_size=1, max_size=3))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole)))
        damage = data.draw(st.sampled_from([
            b"", b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b"0", b"5", b"\xff", b"content-length: 3\r\n",
            b"transfer-encoding: chunked\r\n", b"\r\n0\r\n\r\n", b"connection: close\r\n",
        ]))
        whole[at : at + data.draw(st.integers(0, 3))] = damage
    found = read([bytes(whole)])
    assert read(data.draw(cut(bytes(whole)))) == found
    expected, _ = read_by_h11(bytes(whole))
    for ours, theirs in zip(found[0], expected, strict=False):
        assert ours == theirs
