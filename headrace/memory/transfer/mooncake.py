"""`MooncakeBackend`: writes by Mooncake's TransferEngine, over RDMA or TCP, without a metadata server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import AnyRegion, Copy, refuse_unknown

PEER_TO_PEER = "P2PHANDSHAKE"
WRITTEN, FAILED = 1, -1
"""Of what ``transfer_check_status`` returns: these are ends."""
REFUSED = (0, -1, 2**64 - 1)
"""In place of a batch: nothing began."""
PAUSE_S = 0.0002


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
        # Each alone: the library's calls for batches return when one has failed or 30 s are over, and others go on.
        begun = [
            self._engine.transfer_submit_write(
                self._peer.session, self._region.address + copy.begin, self._peer.address + copy.target, copy.num_bytes
            )
            for copy in copies
        ]
        ends = [self._await(batch) for batch in begun]
        if any(status != WRITTEN for status in ends):
            raise TransferFailed(f"Mooncake could not write to {self._peer.session}")

    def _await(self, batch: int) -> int:
        """How a copy ended, when it has."""
        if batch in REFUSED:
            return FAILED
        while (status := int(self._engine.transfer_check_status(batch))) not in (WRITTEN, FAILED):
            time.sleep(PAUSE_S)
        return status

    def close(self) -> None:
        """See `Destination`: sessions are the engine's."""
