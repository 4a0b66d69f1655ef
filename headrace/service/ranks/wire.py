"""The connection between rank 0 and the agents of other hosts: who may open one, and what goes over it.

Both ends prove that they know the token: each makes a number that the other authenticates with HMAC-SHA256. What
follows is not encrypted. Records of msgspec, each with a length prefix as in service/framing; lengths are bounded
until the other end is known.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.base import VERSION
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.base.messages import ErrorInfo, Place
from headrace.service.framing import LENGTH, frame

MAX_BYTES = 1 << 18
"""Of a message of an end that has not proved itself."""
GREETING_S = 10.0
LEAST_TOKEN_BYTES = 16


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """The first message, of rank 0."""

    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The agent's answer. It opens the connection of host number ``node``, with the options of its command line where
    it has one; or the line of ``rank`` of a host whose ``session`` is open."""

    nonce: bytes
    proof: bytes
    node: int
    session: str = ""
    rank: int = 0
    version: str = VERSION
    options: dict[str, Any] | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Rank 0 accepts."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Rank 0 does not accept, and closes."""

    error: ErrorInfo


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Start the workers of these ranks, for the model of this `find_fingerprint`."""

    session: str
    places: dict[int, Place]
    builder: str
    config: EngineConfig
    fingerprint: str


class Forward(msgspec.Struct, frozen=True, array_like=True, tag="forward"):
    """Pass an encoded command on to all workers."""

    message: bytes


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Rank 0 lives."""


class Kill(msgspec.Struct, frozen=True, array_like=True, tag="kill"):
    """End a worker at once."""

    rank: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The engine ends. Unless it ``is_final``, because it could not start, another may come."""

    is_final: bool


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag="prepared"):
    """The host has the model, under this name, and ``threads`` of its own command line."""

    model: str
    threads: int | None


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The worker of ``rank`` runs."""

    rank: int
    pid: int


class Beats(msgspec.Struct, frozen=True, array_like=True, tag="beats"):
    """The heartbeats of workers so far, by rank; of none where the agent alone gives a sign of life."""

    counts: dict[int, int]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The worker of ``rank`` has ended with an exit code."""

    rank: int
    code: int


class Unable(msgspec.Struct, frozen=True, array_like=True, tag="unable"):
    """The host cannot start its workers."""

    error: ErrorInfo


ToAgent = Begin | Forward | Beat | Kill | End
FromAgent = Prepared | Started | Beats | Ended | Unable
Greeting = Challenge | Hello | Welcome | Refused

decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_greeting = msgspec.msgpack.Decoder(Greeting).decode


def read_token(path: str) -> bytes:
    """The token in a file; raises `ConfigError` for none, and for one that could be guessed."""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="node_token_file") from error
    if len(token) < LEAST_TOKEN_BYTES:
        raise ConfigError(
            f"the token in {path} needs {LEAST_TOKEN_BYTES} characters at least; make one: openssl rand -hex 32",
            param="node_token_file",
        )
    return token


def _prove(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token, role + first + second, "sha256")


def greet(line: socket.socket, token: bytes, make: Callable[[bytes, bytes], Hello]) -> None:
    """On the agent: open the connection. ``make`` gets the nonce and the proof of the `Hello`. Raises `ConfigError`
    where the other end refuses or does not know the token, and `OSError`."""
    challenge, nonce = read_greeting(line), secrets.token_bytes(32)
    if not isinstance(challenge, Challenge):
        raise ConfigError("what answers there is no engine of Headrace", param="master_addr")
    line.sendall(frame(make(nonce, _prove(token, b"agent", challenge.nonce, nonce))))
    answer = read_greeting(line)
    if isinstance(answer, Refused):
        raise answer.error.to_error()
    expected = _prove(token, b"engine", nonce, challenge.nonce)
    if not isinstance(answer, Welcome) or not hmac.compare_digest(answer.proof, expected):
        raise ConfigError("rank 0 does not know the token of this host", param="node_token_file")


def admit(line: socket.socket, token: bytes, check: Callable[[Hello], None]) -> Hello:
    """On rank 0: accept a connection. ``check`` raises what speaks against it, which the agent gets too. Raises typed
    errors and `OSError`."""
    nonce = secrets.token_bytes(32)
    line.sendall(frame(Challenge(nonce)))
    hello = read_greeting(line)
    if not isinstance(hello, Hello):
        raise EngineUnavailable("what connected is no agent of Headrace")
    try:
        if not hmac.compare_digest(hello.proof, _prove(token, b"agent", nonce, hello.nonce)):
            raise ConfigError(
                "the token of this host is another than that of rank 0; give both the same --node-token-file",
                param="node_token_file",
            )
        check(hello)
    except ConfigError as error:
        line.sendall(frame(Refused(ErrorInfo.of(error))))
        raise
    line.sendall(frame(Welcome(_prove(token, b"engine", hello.nonce, nonce))))
    return hello


def read_greeting(line: socket.socket) -> Greeting:
    """The next message of an end that is not known yet; raises `OSError` when none comes in time, and
    `EngineUnavailable` for anything else than a short record."""
    deadline = time.monotonic() + GREETING_S
    length = LENGTH.unpack(_read(line, LENGTH.size, deadline))[0]
    if length > MAX_BYTES:
        raise EngineUnavailable("what is at the other end does not speak this protocol")
    try:
        greeting: Greeting = decode_greeting(_read(line, length, deadline))
        return greeting
    except msgspec.DecodeError as error:
        raise EngineUnavailable("what is at the other end does not speak this protocol") from error


def _read(line: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        line.settimeout(max(0.01, deadline - time.monotonic()))
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    line.settimeout(None)
    return data


def find_fingerprint(config: EngineConfig) -> str:
    """What tells two models apart, by `headrace.models.source.digest_model`. Raises what keeps the model from being
    found."""
    from headrace.models.source import digest_model, resolve_source

    return digest_model(resolve_source(config.model))
