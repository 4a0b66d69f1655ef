"""KV events: which pages of tokens an engine's device cache holds, as routers of others want to know it; in the format
of vLLM's publisher (https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events/), whose names these are. A block is
a page of the cache group that holds all tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.option import read_object

DEVICE_MEDIUM = "GPU"
"""What routers know the device's own cache by, on a CPU too."""
EXAMPLE = '{"endpoint": "tcp://*:5557"}'


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    """Blocks were stored, one behind the other. ``block_hashes`` name them, whatever engine computes them;
    ``parent_block_hash`` that before the first, None at the beginning of a prompt. ``token_ids`` are theirs,
    ``block_size`` a block's. ``extra_keys`` by block: what else tells it apart (the cache's namespace)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE_MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """Nothing is stored: the cache was reset, or the engine has just started."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """A message. ``ts``: seconds since 1970; ``data_parallel_rank``: the replica."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int = 0


class KvEventOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON object of ``kv_events_config``, with the names and defaults of vLLM's. Endpoints are ZeroMQ's; those
    with ``*`` are bound, others connected to. ``replay_endpoint`` answers requests for the last ``buffer_steps``
    messages. ``hwm``: messages queued for a slow subscriber before some are dropped; ``max_queue_size``: those not sent
    to anybody yet."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def read_event_options(text: str | None) -> KvEventOptions | None:
    """The options, None where no events are wanted; raises `ConfigError`."""
    if text is None:
        return None
    stated: dict[str, Any] = read_object(text, "kv_events_config", example=EXAMPLE)
    try:
        options = msgspec.convert(stated, KvEventOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_events_config: {error}; an example: {EXAMPLE}", param="kv_events_config") from error
    if options.publisher not in ("zmq", "null"):
        raise ConfigError(f"kv_events_config: publisher is zmq or null, not {options.publisher!r}",
                          param="kv_events_config")
    if min(options.buffer_steps, options.hwm, options.max_queue_size) < 1:
        raise ConfigError("kv_events_config: buffer_steps, hwm and max_queue_size are at least 1",
                          param="kv_events_config")
    return options if options.enable_kv_cache_events and options.publisher == "zmq" else None


def shift_endpoint(endpoint: str, replica: int) -> str:
    """The endpoint of a replica: its number is added to the port, or to the name. Raises `ConfigError`."""
    if not replica:
        return endpoint
    if endpoint.startswith("tcp://"):
        head, _, port = endpoint.rpartition(":")
        if not port.isdigit():
            raise ConfigError(f"kv_events_config: {endpoint} has no port", param="kv_events_config")
        return f"{head}:{int(port) + replica}"
    return f"{endpoint}_dp{replica}"
