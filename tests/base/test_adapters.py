"""The options and messages of adapters."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.adapters import AdapterConfig, LoadAdapter, LoRARequest
from headrace.base.admin import ADMIN_CALLS
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError


@pytest.mark.parametrize("text, expected", [
    ("", []),
    ("sql=/data/sql", [LoRARequest("sql", "/data/sql")]),
    ("a=x  b=y=z", [LoRARequest("a", "x"), LoRARequest("b", "y=z")]),
    ('{"name": "a", "path": "with blank", "base_model_name": "b"}', [LoRARequest("a", "with blank")]),
    ('{"name": "a", "path": "x"} {"name": "b", "path": "y z"}', [LoRARequest("a", "x"), LoRARequest("b", "y z")]),
    ('[{"name": "a", "path": "x"}, {"name": "b", "path": "y"}]', [LoRARequest("a", "x"), LoRARequest("b", "y")]),
    ('a=x {"name": "b", "path": "y z"}\tc=z', [LoRARequest("a", "x"), LoRARequest("b", "y z"), LoRARequest("c", "z")]),
])
def test_modules_are_pairs_or_json(text: str, expected: list[LoRARequest]):
    assert AdapterConfig(enable_lora=True, lora_modules=text).modules == expected


@pytest.mark.parametrize("text", [
    "a", "=x", "a=", "[", '[{"name": "a"}]', "[3]", "a=x a=y", '{"name": "a", "path": 3}',
    '{"name": "a", "path": "x"} b', '{"name": "a", "path": "x"} a=y',
])
def test_modules_that_make_no_sense_are_refused(text: str):
    with pytest.raises(ConfigError, match="lora_modules"):
        AdapterConfig(enable_lora=True, lora_modules=text)


def test_modules_without_adapters_are_refused():
    with pytest.raises(ConfigError, match="needs enable_lora"):
        AdapterConfig(lora_modules="a=x")


def test_host_memory_has_room_for_all_slots():
    assert AdapterConfig().num_host_adapters == 32
    assert AdapterConfig(max_loras=64).num_host_adapters == 64
    assert AdapterConfig(max_loras=4, max_cpu_loras=6).num_host_adapters == 6


def test_calls_and_options_cross_processes():
    call = LoadAdapter("a", tensors=b"\0\1", config="{}", replaces=True)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(call))
    assert msgspec.convert(sent, ADMIN_CALLS["load_adapter"]) == call
    config = EngineConfig(adapters=AdapterConfig(enable_lora=True, lora_modules="a=x"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
