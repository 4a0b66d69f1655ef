"""Options: bounds, types, unknown names, device defaults, and the trip across the process border."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base import quantization
from headrace.base.config import EngineConfig, all_options, engine_config, flatten, resolve_for_device
from headrace.base.errors import ConfigError


def test_every_option_is_documented_and_named_once():
    options = all_options()
    assert len({o.name for o in options}) == len(options) < 120
    assert all(len(o.doc) > 10 for o in options)


@pytest.mark.parametrize(("options", "message"), [
    ({"page_size": 0}, "from 1 to 1024"), ({"policy": "lifo"}, "fcfs, longest-prefix, priority"),
    ({"memory_fraction": "lots"}, "takes a number"),
    ({"pagesize": 4}, "did you mean page_size"), ({"prefix_cache": 1}, "takes true or false"),
    ({"kv_pages": True}, "takes an integer"), ({"page_size": 3}, "power of two"),
    ({"enable_expert_parallel": True}, "there is one: set tensor_parallel_size"),
    ({"model": "mod\udce9le"}, "model must be UTF-8"),
    ({"memory_fraction": float("nan")}, "finite"), ({"default_deadline_s": float("inf")}, "finite"),
    ({"overlap_depth": 3}, "from 1 to 2"),
    ({"dtype": "bf16"}, "auto, float32, bfloat16, float16; got 'bf16'; did you mean bfloat16"),
    ({"disk_cache_gb": 3.0}, "disk_cache, which is not set"), ({"hot_host_gb": 3.0}, "hot_slots, which are not set"),
    ({"no_such": 1}, "no_such"), ({"host_cache_gb": 1.0, "prefix_cache": False}, "prefix cache is off"),
    ({"kv_dtype": "int4"}, "did you mean int8"), ({"load_format": "xyz"}, "got 'xyz'$"),
    ({"device": "gpu"}, r"auto, cpu, cuda or cuda:N; got 'gpu'; did you mean cuda\?"), ({"device": "cpu:0"}, "cuda:N"),
    ({"device": "cuda:x"}, "cuda:N"), ({"device": "cuda:1\n"}, "cuda:N"),
    ({"quantization": "int9"}, "fp8, int4, int8, w8a8, none, stored, or .* got 'int9'; did you mean int8"),
    ({"quantization": "gptqq"}, "did you mean gptq"), ({"PAGE_SIZE": 4}, "did you mean page_size"),
    ({"enable_lora": True, "pipeline_parallel_size": 2}, "not served by pipeline stages; use tensor_parallel_size"),
    (
        {"enable_lora": True, "tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True},
        "leave out enable_eplb or enable_lora"
    ),
    (
        {"speculative_config": {"method": "mtp"}, "pipeline_parallel_size": 2},
        "use method ngram or suffix, or leave pipeline_parallel_size at 1"
    ),
])
def test_bad_values_name_the_field_and_the_fix(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        engine_config(**options)


def test_integers_are_fine_where_floats_are_asked():
    assert engine_config(default_deadline_s=3).scheduler.default_deadline_s == 3.0


def test_device_defaults_fill_only_what_is_open():
    config = resolve_for_device(engine_config(max_step_tokens=99), "cuda")
    assert (config.scheduler.max_step_tokens, config.scheduler.overlap_depth) == (99, 2)
    assert resolve_for_device(engine_config(), "a device not known").scheduler.overlap_depth == 1


def test_config_crosses_the_process_border():
    config = engine_config(model="somewhere", page_size=32, default_deadline_s=1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert flatten(config)["page_size"] == 32


def test_devices_and_quantization_that_may_exist_pass(monkeypatch: pytest.MonkeyPatch):
    """A package may bring a scheme, which only the engine can know."""
    for device in ("auto", "cpu", "cuda", "cuda:7"):
        assert engine_config(device=device).device.device == device
    for name in (None, "none", "stored", "int4", "gptq"):
        assert engine_config(quantization=name).model.quantization == name
    monkeypatch.setattr(quantization, "installed_points", lambda group: [group] if group == "headrace.schemes" else [])
    assert engine_config(quantization="acme").model.quantization == "acme"
