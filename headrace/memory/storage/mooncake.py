"""`MooncakeStore`: pages in the memory of a cluster, by Mooncake Store. Its master is a daemon of its own
(``mooncake_master``); processes that give it memory may be these or ``mooncake_client``.
"""

from __future__ import annotations

import mmap
import queue
import re
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.memory.storage import StoreOptions

STAGE_BYTES = 64 << 20
"""Of each call at a time; it is registered with the network, so all of it is committed."""
NUM_STAGES = 4
ERRORS = {-200: "no room in the store", -704: "no such page", -900: "the master does not answer"}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class MooncakeConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of Mooncake's JSON file. Sizes are bytes, or text such as ``"4GB"`` (powers of 1024)."""

    master_server_address: str
    local_hostname: str = "127.0.0.1"
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: int | str = 0
    local_buffer_size: int | str = 16 << 20
    protocol: str = "tcp"
    device_name: str = ""
    tenant_id: str = "default"


def read_config(config: dict[str, Any]) -> MooncakeConfig:
    """Raises `ConfigError`."""
    try:
        read = msgspec.convert(config, MooncakeConfig)
        sizes = {name: read_size(getattr(read, name)) for name in ("global_segment_size", "local_buffer_size")}
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"remote_cache mooncake: {error}; for example "
            """--remote-cache-config '{"master_server_address": "host:50051", "global_segment_size": "16GB"}'""",
            param="remote_cache_config"
        ) from error
    return msgspec.structs.replace(read, **sizes)


def read_size(size: int | str) -> int:
    """Bytes; raises `ValueError`."""
    found = SIZE.fullmatch(str(size).strip())
    if found is None:
        raise ValueError(f"{size!r} is no size")
    return int(float(found[1]) * FACTORS[found[2].lower()])


class _Stage:
    """Registered memory. ``data``: uint8 of `STAGE_BYTES`."""

    def __init__(self, store: Any):
        self._map = mmap.mmap(-1, STAGE_BYTES)
        self.data = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.data.ctypes.data)
        if store.register_buffer(self.address, STAGE_BYTES) != 0:
            raise ConfigError(f"Mooncake cannot register {STAGE_BYTES} bytes of memory", param="remote_cache")


class MooncakeStore:
    """See `PageStore`. ``config``: see `MooncakeConfig`."""

    def __init__(self, options: StoreOptions):
        config = read_config(options.config)
        env.quieten_mooncake()
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"Mooncake is not usable here ({error}); install headrace[mooncake]", param="remote_cache"
            ) from error
        self._store = MooncakeDistributedStore()
        status = self._store.setup(
            config.local_hostname, config.metadata_server, config.global_segment_size, config.local_buffer_size,
            config.protocol, config.device_name, config.master_server_address, tenant_id=config.tenant_id
        )
        if status != 0:
            raise ConfigError(
                f"Mooncake cannot join the store of {config.master_server_address} as {config.local_hostname}: status "
                f"{status}", param="remote_cache_config"
            )
        self._stages: queue.SimpleQueue[_Stage] = queue.SimpleQueue()
        for _ in range(NUM_STAGES):
            self._stages.put(_Stage(self._store))

    def exists(self, names: list[str]) -> list[bool]:
        """See `PageStore`."""
        found = self._store.batch_is_exist(names)
        _check(found)
        return [has == 1 for has in found]

    def get(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        return self._stage(names, buffers, is_put=False)

    def put(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        """See `PageStore`."""
        return self._stage(names, buffers, is_put=True)

    def close(self) -> None:
        """See `PageStore`."""
        self._store.close()

    def _stage(self, names: list[str], buffers: list[memoryview], is_put: bool) -> list[bool]:
        """Through one stage, as many pages at a time as it holds; a page that is larger is not stored."""
        has, begin, stage = [False] * len(names), 0, self._stages.get()
        try:
            while begin < len(names):
                end, size = begin, 0
                while end < len(names) and size + len(buffers[end]) <= STAGE_BYTES:
                    size += len(buffers[end])
                    end += 1
                if end > begin:
                    has[begin:end] = self._move(stage, names[begin:end], buffers[begin:end], is_put)
                begin = max(end, begin + 1)
        finally:
            self._stages.put(stage)
        return has

    def _move(self, stage: _Stage, names: list[str], buffers: list[memoryview], is_put: bool) -> list[bool]:
        sizes = [len(buffer) for buffer in buffers]
        begins = [0, *accumulate(sizes)][:-1]
        addresses = [stage.address + begin for begin in begins]
        parts = [stage.data[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        if is_put:
            for part, buffer in zip(parts, buffers, strict=True):
                part[:] = np.frombuffer(buffer, dtype=np.uint8)
            done = self._store.batch_put_from(names, addresses, sizes)
            _check(done)
            return [status == 0 for status in done]
        done = self._store.batch_get_into(names, addresses, sizes)
        _check(done)
        for part, buffer, length in zip(parts, buffers, done, strict=True):
            if length == len(buffer):
                buffer[:] = part.data
        return [length == size for length, size in zip(done, sizes, strict=True)]


def _check(statuses: list[int]) -> None:
    """Raise `RuntimeError` where nothing was done, but for pages that are not there and a store that is full."""
    worst = min(statuses, default=0)
    if worst < 0 and all(status < 0 and status not in (-704, -200) for status in statuses):
        raise RuntimeError(f"Mooncake: {ERRORS.get(worst, 'it failed')} (status {worst})")
