"""`NixlBackend`: writes by NVIDIA's NIXL, over RDMA where there is any, else TCP or memory of the host (UCX)."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import AnyRegion, Copy, refuse_unknown

PAUSE_S, RELEASE_PAUSE_S = 0.0002, 0.01


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    name: str
    metadata: bytes
    address: int
    num_bytes: int


def import_nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """The module of the installed wheel, whichever CUDA it is built for, and the exceptions that NIXL raises, which
    have no common base; raises `ConfigError`."""
    try:
        from nixl_cu13 import _api, _bindings
    except ImportError:
        try:
            from nixl import _api, _bindings
        except ImportError as error:
            raise ConfigError(f"NIXL is not usable here ({error}); install headrace[nixl]") from error
    own = (item for item in vars(_bindings).values() if isinstance(item, type) and issubclass(item, Exception))
    return _api, (*own, RuntimeError, ValueError, TypeError, KeyError)


class NixlBackend:
    """See `TransferBackend`. Option ``backends``: NIXL's own plug-ins, separated by commas (default UCX)."""

    memory: ClassVar[Literal["host"]] = "host"

    def __init__(self, region: AnyRegion, options: Mapping[str, str]):
        refuse_unknown(options, ("backends",))
        api, self._errors = import_nixl()
        self._region, self._name = region, f"headrace-{secrets.token_hex(8)}"
        try:
            config = api.nixl_agent_config(backends=options.get("backends", "UCX").split(","))
            self._agent = api.nixl_agent(self._name, config)
            self._memory = self._agent.register_memory([(region.address, region.num_bytes, 0, "")], "DRAM")
        except self._errors as error:
            raise ConfigError(f"NIXL cannot start: {type(error).__name__}: {error}") from error

    def handle(self) -> bytes:
        """See `TransferBackend`."""
        metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(_Handle(self._name, metadata, self._region.address, self._region.num_bytes))

    def connect(self, handle: bytes) -> _NixlDestination:
        """See `TransferBackend`."""
        errors: tuple[type[Exception], ...] = (msgspec.DecodeError, *self._errors)
        try:
            peer = msgspec.msgpack.decode(handle, type=_Handle)
            name = self._agent.add_remote_agent(peer.metadata)
        except errors as error:
            raise TransferFailed(f"NIXL cannot reach the peer: {type(error).__name__}: {error}") from error
        return _NixlDestination(self._agent, self._region, peer, name, self._errors)

    def close(self) -> None:
        """See `TransferBackend`."""
        self._agent.deregister_memory(self._memory)


class _NixlDestination:
    def __init__(
        self, agent: Any, region: AnyRegion, peer: _Handle, name: Any, errors: tuple[type[Exception], ...]
    ):
        self._agent, self._region, self._peer, self._errors = agent, region, peer, errors
        self._name = name.decode() if isinstance(name, bytes) else str(name)

    def write(self, copies: Sequence[Copy]) -> None:
        """See `Destination`."""
        for copy in copies:
            self._region.check(copy.begin, copy.num_bytes)
            if copy.target < 0 or copy.target + copy.num_bytes > self._peer.num_bytes:
                raise TransferFailed("a write is outside of the peer's region")
        local = [(self._region.address + c.begin, c.num_bytes, 0) for c in copies]
        remote = [(self._peer.address + c.target, c.num_bytes, 0) for c in copies]
        try:
            self._transfer(self._agent.get_xfer_descs(local, "DRAM"), self._agent.get_xfer_descs(remote, "DRAM"))
        except self._errors as error:
            raise TransferFailed(f"NIXL: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """See `Destination`."""
        with contextlib.suppress(*self._errors):  # the peer may have died
            self._agent.remove_remote_agent(self._name)

    def _transfer(self, local: Any, remote: Any) -> None:
        transfer = self._agent.initialize_xfer("WRITE", local, remote, self._name, b"")
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC":
                time.sleep(PAUSE_S)
                state = self._agent.check_xfer_state(transfer)
            if state != "DONE":
                raise TransferFailed(f"NIXL could not write: {state}")
        finally:
            while not self._has_released(transfer):  # a part has failed, others are written still
                time.sleep(RELEASE_PAUSE_S)

    def _has_released(self, transfer: Any) -> bool:
        try:
            self._agent.release_xfer_handle(transfer)
        except self._errors:
            return False
        return True
