"""KV events: a subscriber knows at any time what the device's prefix cache holds, in the words of vLLM's publisher."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_tiers_served as tiers
import zmq

from headrace.base.config import CacheConfig, engine_config
from headrace.base.errors import ConfigError
from headrace.base.kv_events import KvEventOptions, read_event_options, shift_endpoint
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.build import build_engine
from headrace.service.engine import Engine
from headrace.service.kv_events import EventGate, EventPublisher

PAGE = 16


# As the subscriber of vLLM's documentation decodes them.
class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Events(Batch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """Keeps the prefix of every stored block."""

    def __init__(self, endpoint: str, topic: str = ""):
        self.line = zmq.Context.instance().socket(zmq.SUB)
        self.line.connect(endpoint)
        self.line.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.prefixes: dict[Any, tuple[Any, ...]] = {}
        self.numbers: list[int] = []

    def take(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload, type=Events).events:
            match event:
                case AllBlocksCleared():
                    self.prefixes.clear()
                case BlockRemoved(block_hashes=hashes):
                    for name in hashes:
                        del self.prefixes[name]  # KeyError: it was never stored, or removed twice
                case BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=ids, block_size=size):
                    assert len(ids) == len(hashes) * size and event.medium == "GPU"
                    keys = event.extra_keys or [None] * len(hashes)
                    known = self.prefixes[parent] if parent is not None else ()
                    for index, (name, key) in enumerate(zip(hashes, keys, strict=True)):
                        known = (*known, *ids[index * size : (index + 1) * size])
                        assert name not in self.prefixes and 0 <= name < 1 << 63
                        self.prefixes[name] = known if key is None or index or parent is not None else (key, *known)
                        known = self.prefixes[name]

    def hear(self, engine: Engine) -> None:
        """All that the engine has published."""
        gate = next(c for c in engine._waiting_room._coordinators if isinstance(c, EventGate))
        while not self.numbers or self.numbers[-1] < gate._publisher._next - 1:
            assert self.line.poll(10_000), "nothing was published"
            _, number, payload = self.line.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            self.take(payload)


def open_engine(tmp_path: Path, **options: Any) -> tuple[Engine, Subscriber]:
    folder, own, _ = tiers.save("Llama", tmp_path / "model")
    endpoint = f"ipc://{tmp_path}/events"
    text = msgspec.json.encode({"endpoint": endpoint, "replay_endpoint": f"{endpoint}-replay", "topic": "kv"}).decode()
    config = engine_config(
        model=folder, skip_tokenizer=True, **{**own, "max_model_len": 160, "kv_events_config": text, **options}
    )
    engine = build_engine(config)
    subscriber = Subscriber(endpoint, "kv")
    time.sleep(0.2)  # a subscription takes effect when the publisher has read it
    return engine, subscriber


def complete(engine: Engine, prompt: list[int], namespace: str = "") -> None:
    engine.submit(EngineRequest("r", prompt, SamplingSpec(), StopSpec(max_tokens=3), namespace=namespace))
    while engine.has_work:
        engine.step()


def stored_prefixes(engine: Engine) -> list[tuple[Any, ...]]:
    """Of every page in the tree: its tokens from the beginning of the prompt on."""
    found = []
    for node in engine._scheduler._ledger.tree.walk():
        runs, step = [], node
        while step is not None:
            runs.append(memoryview(step.key).cast("i").tolist())
            namespace, step = step.namespace, step.parent
        ids = [token for run in reversed(runs) for token in run]
        start = ((namespace,),) if namespace else ()
        found += [(*start, *ids[: (page + 1) * PAGE]) for page in range(node.first_intact(0), node.end)]
    return found


def test_a_subscriber_knows_what_the_cache_holds(tmp_path: Path):
    engine, subscriber = open_engine(tmp_path, page_size=PAGE, kv_pages=24)
    dice = random.Random(0)
    shared = [[dice.randrange(5, 90) for _ in range(50)] for _ in range(3)]
    for turn in range(12):  # far more than the pages hold: prefixes are evicted
        prompt = dice.choice(shared)[: dice.randrange(10, 50)] + [dice.randrange(5, 90) for _ in range(40)]
        complete(engine, prompt, namespace="salt" if turn % 4 == 3 else "")
        subscriber.hear(engine)
        assert sorted(map(str, subscriber.prefixes.values())) == sorted(map(str, stored_prefixes(engine)))
    assert engine.stats().evicted_pages_total > 0 and subscriber.prefixes
    assert engine.reset_prefix_cache()
    complete(engine, [7] * 40)
    subscriber.hear(engine)
    assert sorted(subscriber.prefixes.values()) == [(7,) * 16, (7,) * 32]
    assert subscriber.numbers == list(range(subscriber.numbers[0], len(subscriber.numbers) + subscriber.numbers[0]))
    # What a subscriber missed is sent again.
    late = Subscriber(f"ipc://{tmp_path}/events", "kv")
    replay = zmq.Context.instance().socket(zmq.DEALER)
    replay.connect(f"ipc://{tmp_path}/events-replay")
    replay.send_multipart((b"", (0).to_bytes(8, "big")))
    while replay.poll(10_000):
        _, number, payload = replay.recv_multipart()
        if int.from_bytes(number, "big", signed=True) == -1:
            break
        late.take(payload)
    assert late.prefixes == subscriber.prefixes
    engine.close()


def test_a_closed_engine_publishes_no_more_and_leaves_its_port(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder, own, _ = tiers.save("Llama", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
    text = msgspec.json.encode({"endpoint": endpoint}).decode()
    for _ in range(2):
        engine = build_engine(engine_config(model=folder, skip_tokenizer=True, **own, kv_events_config=text))
        complete(engine, [7] * 40)
        engine.close()
    assert "tells anyone who reaches it" in caplog.text


def test_options_are_checked():
    assert read_event_options(None) is None and read_event_options('{"publisher": "null"}') is None
    assert read_event_options('{"enable_kv_cache_events": false}') is None
    assert read_event_options('{"endpoint": "tcp://*:6000"}') == KvEventOptions(endpoint="tcp://*:6000")
    for text, words in (
        ("[]", "JSON object"), ('{"port": 5}', "unknown field `port`"), ('{"publisher": "nats"}', "zmq or null"),
        ('{"buffer_steps": 0}', "at least 1"), ('{"hwm": "x"}', "hwm"),
    ):
        with pytest.raises(ConfigError, match=words):
            CacheConfig(kv_events_config=text)
    with pytest.raises(ConfigError, match="without the prefix cache"):
        CacheConfig(kv_events_config="{}", prefix_cache=False)


def test_replicas_publish_elsewhere_and_a_port_in_use_is_said():
    assert shift_endpoint("tcp://*:5557", 2) == "tcp://*:5559" and shift_endpoint("ipc:///x", 1) == "ipc:///x_dp1"
    with pytest.raises(ConfigError, match="has no port"):
        shift_endpoint("tcp://*", 1)
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(ConfigError, match="cannot be published"):
        EventPublisher(KvEventOptions(endpoint=f"tcp://*:{taken.getsockname()[1]}"))
