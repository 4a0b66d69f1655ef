"""`MooncakeBackend`: writes by Mooncake's TransferEngine, over RDMA or TCP, without a metadata server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import AnyRegion, Copy, refuse_unknown

PEER_TO_PEER = "P2PHANDSHAKE"


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    session: str
    address: int
    num_bytes: int


def import_engine() -> Any:
    """``mooncake.engine.TransferEngine``; raises `ConfigError`."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(f"Mooncake is not usable here ({error}); install headrace[mooncake]") from error
    return TransferEngine


class MooncakeBackend:
    """See `TransferBackend`. Options: ``host``, the address that peers reach this one by (default 127.0.0.1);
    ``protocol``, tcp (default) or rdma; ``device``, names of RDMA devices."""

    memory: ClassVar[Literal["host"]] = "host"

    def __init__(self, region: AnyRegion, options: Mapping[str, str]):
        refuse_unknown(options, ("host", "protocol", "device"))
        self._engine, self._region = import_engine()(), region
        host = options.get("host", "127.0.0.1")
        status = self._engine.initialize(host, PEER_TO_PEER, options.get("protocol", "tcp"), options.get("device", ""))
        if status != 0:
            raise ConfigError(f"Mooncake cannot start on {host}: status {status}")
        if self._engine.register_memory(region.address, region.num_bytes) != 0:
            raise ConfigError(f"Mooncake cannot register {region.num_bytes} bytes of memory")
        self._session = f"{host}:{self._engine.get_rpc_port()}"

    def handle(self) -> bytes:
        """See `TransferBackend`."""
        return msgspec.msgpack.encode(_Handle(self._session, self._region.address, self._region.num_bytes))

    def connect(self, handle: bytes) -> _MooncakeDestination:
        """See `TransferBackend`."""
        try:
            peer = msgspec.msgpack.decode(handle, type=_Handle)
        except msgspec.DecodeError as error:
            raise TransferFailed(f"the peer's handle is not Mooncake's: {error}") from error
        return _MooncakeDestination(self._engine, self._region, peer)

    def close(self) -> None:
        """See `TransferBackend`."""
        self._engine.unregister_memory(self._region.address)


class _MooncakeDestination:
    def __init__(self, engine: Any, region: AnyRegion, peer: _Handle):
        self._engine, self._region, self._peer = engine, region, peer

    def write(self, copies: Sequence[Copy]) -> None:
        """See `Destination`."""
        for copy in copies:
            self._region.check(copy.begin, copy.num_bytes)
            if copy.target < 0 or copy.target + copy.num_bytes > self._peer.num_bytes:
                raise TransferFailed("a write is outside of the peer's region")
        status = self._engine.batch_transfer_sync_write(
            self._peer.session, [self._region.address + c.begin for c in copies],
            [self._peer.address + c.target for c in copies], [c.num_bytes for c in copies]
        )
        if status != 0:
            raise TransferFailed(f"Mooncake could not write to {self._peer.session}: status {status}")

    def close(self) -> None:
        """See `Destination`: sessions are the engine's."""
