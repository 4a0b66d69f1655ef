"""From the fields of a routed request to where its KV pages are exchanged, and vLLM's answer to its router."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from functools import wraps
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.config import EngineConfig
from headrace.base.disaggregation import BOOTSTRAP_PORT
from headrace.base.errors import HeadraceError, RequestError
from headrace.base.sampling import SamplingParams, TransferSpec
from headrace.serving.http.generation.context import AppContext, context_of
from headrace.serving.http.generation.sampling import spread
from headrace.serving.http.protocol.fields import TransferParams
from headrace.serving.http.protocol.openai import TransferAnswer
from headrace.serving.http.transport.endpoint import Handler

ROOMS = "rooms"
"""Of a request's state: where a decode engine waits for pages of a prefill server."""


class ExchangeBody(Protocol):
    """Bodies with `headrace.serving.http.protocol.fields.ExchangeFields`."""

    bootstrap_host: str | list[str | None] | None
    bootstrap_port: int | list[int | None] | None
    bootstrap_room: int | list[int] | None
    kv_transfer_params: TransferParams | None


def with_transfers(params: Sequence[SamplingParams], body: ExchangeBody, config: EngineConfig) -> list[SamplingParams]:
    """The parameters of each prompt, with a room of its own where the body asks for an exchange. Raises `RequestError`
    for what is incomplete, and where this server exchanges nothing."""
    role, specs = config.disaggregation.disaggregation_mode, _read_bootstrap(body, len(params))
    vllm = None
    if body.kv_transfer_params is not None:
        vllm = _read_vllm(body.kv_transfer_params, role)
        if vllm is not None and specs:
            raise RequestError("bootstrap_room and kv_transfer_params exclude each other", param="kv_transfer_params")
        specs = specs if vllm is None else _number(vllm, len(params))
    if not specs:
        return list(params)
    if role is None:
        raise RequestError(
            "this server exchanges no KV pages: leave out bootstrap_room and kv_transfer_params, or start it with "
            "--disaggregation-mode prefill or decode", param="bootstrap_room" if vllm is None else "kv_transfer_params"
        )
    if role == "decode" and not all(spec.host for spec in specs):
        raise RequestError(
            "bootstrap_host is required: the address of the prefill server's transfer agent", param="bootstrap_host"
        )
    return [msgspec.structs.replace(p, transfer=spec) for p, spec in zip(params, specs, strict=True)]


def telling_refusals(handler: Handler) -> Handler:
    """``handler`` of a route whose requests are exchanged: a decode engine hears at once of one that is refused after
    `note_rooms`."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except HeadraceError as error:
            rooms = request.scope.get("state", {}).get(ROOMS)
            for replica in context_of(request).client.replicas if rooms else ():
                replica.decline(rooms, error.message)
            raise

    return handle


def note_rooms(request: Request, body: ExchangeBody, context: AppContext) -> None:
    """For `telling_refusals`: where a decode engine waits, if this is a prefill server. No more rooms than a request
    may have prompts: the engine sends a message for each."""
    if body.bootstrap_room is not None and context.client.config.disaggregation.disaggregation_mode == "prefill":
        rooms = body.bootstrap_room if isinstance(body.bootstrap_room, list) else [body.bootstrap_room]
        known = [str(room) for room in rooms[: context.server.max_batch_prompts]]
        request.scope.setdefault("state", {})[ROOMS] = known


def answer_router(
    params: Sequence[object], body: ExchangeBody, config: EngineConfig
) -> TransferAnswer | UnsetType:
    """``kv_transfer_params`` of a prefill server's response, for vLLM's router; unset for any other request."""
    asked, role = body.kv_transfer_params, config.disaggregation
    spec = params[0].transfer if isinstance(params[0], SamplingParams) else None
    if asked is None or not asked.do_remote_decode or spec is None or role.disaggregation_mode != "prefill":
        return UNSET
    room, host = spec.room if len(params) == 1 else spec.room.rpartition(".")[0], config.transfer_host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    port = role.disaggregation_bootstrap_port
    return TransferAnswer(f"{host}:{port}", room, host, port)


def _read_bootstrap(body: ExchangeBody, count: int) -> list[TransferSpec]:
    if body.bootstrap_room is None:
        return []
    rooms = spread(body.bootstrap_room, count, "bootstrap_room")
    hosts = spread(body.bootstrap_host, count, "bootstrap_host")
    ports = spread(body.bootstrap_port, count, "bootstrap_port")
    names = [f"{room}.{i}" for i, room in enumerate(rooms)] if isinstance(body.bootstrap_room, int) else map(str, rooms)
    if count == 1:
        names = [str(rooms[0])]
    return [
        TransferSpec(name, host or "", port or BOOTSTRAP_PORT)
        for name, host, port in zip(names, hosts, ports, strict=True)
    ]


def _read_vllm(asked: TransferParams, role: str | None) -> TransferSpec | None:
    if asked.do_remote_decode and role == "prefill":
        return TransferSpec(secrets.token_hex(16))
    if not asked.do_remote_prefill:
        # For a server without a role, whose refusal says so.
        return TransferSpec("") if asked.do_remote_decode and role is None else None
    if not (asked.remote_request_id and asked.remote_host):
        raise RequestError(
            "kv_transfer_params with do_remote_prefill needs remote_request_id, remote_host and remote_port, as the "
            "prefill server's response has them", param="kv_transfer_params"
        )
    return TransferSpec(asked.remote_request_id, asked.remote_host, asked.remote_port or BOOTSTRAP_PORT)


def _number(spec: TransferSpec, count: int) -> list[TransferSpec]:
    if count == 1:
        return [spec]
    return [msgspec.structs.replace(spec, room=f"{spec.room}.{i}") for i in range(count)]
