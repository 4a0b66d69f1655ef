"""`build_executor` on tiny dummy models, and the decisions it is made of."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from driver import Driver
from tiny_checkpoint import write_tiny_checkpoint

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.config import EngineConfig, engine_config
from headrace.base.errors import ConfigError, HeadraceError, ModelError, OutOfDeviceMemory
from headrace.base.parallel import ParallelConfig
from headrace.base.sampling import SamplingSpec
from headrace.base.step import StepPlan
from headrace.execution import building, tiers, warmup
from headrace.execution import device as device_module
from headrace.execution.building import build_executor
from headrace.execution.device import resolve_device, resolve_dtype, resolve_dtypes, set_threads
from headrace.execution.loading import check_codes, load_model
from headrace.execution.result import PendingSample
from headrace.layers.attention.contract import AttentionBackend
from headrace.layers.rotary import RotaryTable
from headrace.memory import host_memory
from headrace.memory.plan import CachePlan
from headrace.memory.pools import KeyValuePool
from headrace.service.client.client import EngineClient

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 2, 999], "temperature": 0.6, "top_k": 20, "do_sample": True})
    )
    return tmp_path


def config_of(folder: Path, **options: object) -> EngineConfig:
    return engine_config(**{"model": str(folder), "load_format": "dummy", "device": "cpu", "kv_pages": 40, **options})


def test_backends_plan_ahead_for_the_pools_that_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def plan_ahead(self, pages, params, most_tokens, longest):
        for _ in range(2):
            asked.append((pages.k.data_ptr(), len(pages.k), params.scale, most_tokens, longest))
            yield True

    monkeypatch.setattr(AttentionBackend, "plan_ahead", plan_ahead)
    executor = build_executor(config_of(folder, max_step_tokens=100, max_running_requests=8))
    runner = executor._runner
    keys = runner.pools[0].layer(0)[0]
    assert asked == [(keys.data_ptr(), len(keys), 8**-0.5, 100, 256)], "the first before any request"
    assert runner.plan_next() and not runner.plan_next() and len(set(asked)) == 1
    executor.close()
    again = build_executor(config_of(folder))._runner
    again.detach()
    assert not again.plan_next(), "its pages are gone"


@pytest.mark.parametrize(("options", "gib"), [
    ({}, 32), ({"hot_host_gb": 50.0}, 50), ({"tensor_parallel_size": 2}, 16), ({"host_cache_gb": 40.0}, 12),
    ({"data_parallel_size": 2}, 16), ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 8),
], ids=str)
def test_host_memory_behind_hot_slots_leaves_room_for_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], gib: int
):
    monkeypatch.setattr(building, "free_bytes", lambda _: 64 * 2**30)
    assert building._host_bytes(config_of(folder, hot_slots=16, **options)) == gib * 2**30


def test_host_memory_behind_hot_slots_beside_that_of_prefixes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(building, "free_bytes", lambda _: 64 * 2**30)
    config = config_of(folder, hot_slots=16, hot_host_gb=30.0, host_cache_gb=40.0)
    with pytest.raises(ConfigError, match=r"the 24\.0 GiB .* beside 40\.0 GiB of host_cache_gb") as caught:
        building._host_bytes(config)
    assert caught.value.param == "hot_host_gb"


@pytest.mark.parametrize(("options", "free", "named"), [
    ({"data_parallel_size": 2, "hot_host_gb": 32.0}, 64, None),
    ({"data_parallel_size": 2, "hot_host_gb": 33.0}, 64, "hot_host_gb"),
    ({"data_parallel_size": 2, "hot_host_gb": 31.0, "host_cache_gb": 2.0}, 64, "hot_host_gb"),
    ({"data_parallel_size": 4, "hot_host_gb": 1.0, "host_cache_gb": 20.0}, 64, "host_cache_gb"),
    ({"data_parallel_size": 2, "host_cache_gb": 20.0, "tensor_parallel_size": 2}, 40, None),
    ({"data_parallel_size": 2, "disk_cache": "/nowhere"}, 3, "host_cache_gb"),
    ({"host_cache_gb": 65.0}, 64, None),
], ids=str)
def test_replicas_of_a_host_share_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], free: int, named: str | None
):
    """One alone checks when it starts."""
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: free * 2**30)
    config = config_of(folder, hot_slots=16, **options)
    if named is None:
        host_memory.check_replicas(config)
        return
    with pytest.raises(ConfigError, match=r"replicas with .* each take .* lower") as caught:
        EngineClient(config)
    assert caught.value.param == named


def test_ranks_of_a_host_take_its_memory_together(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Each checks before any of them takes its part."""
    monkeypatch.setattr(tiers, "free_bytes", lambda _: 30 * 2**30)
    plan = CachePlan([CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], 9)], 64)
    fits = config_of(folder, host_cache_gb=30.0, tensor_parallel_size=2, page_size=16)
    (group,) = tiers.fit_host(plan, fits, torch.device("cpu")).groups
    assert group.host_pages == 15 * 2**30 // (2 * 16 * 8 * 4)
    with pytest.raises(ConfigError, match="lower it") as caught:
        tiers.fit_host(plan, config_of(folder, host_cache_gb=31.0, tensor_parallel_size=2), torch.device("cpu"))
    assert caught.value.param == "host_cache_gb"
    on_ray = config_of(folder, host_cache_gb=60.0, tensor_parallel_size=2, executor="ray")
    assert tiers.fit_host(plan, on_ray, torch.device("cpu")).groups[0].host_pages > group.host_pages


def test_experts_are_not_divided_where_there_are_none(folder: Path):
    config = config_of(folder, tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="has none; leave it out") as caught:
        load_model(config, CPU, lambda *_: None)
    assert caught.value.param == "enable_expert_parallel"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    mixture = {**CONFIG, **experts, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (folder / "config.json").write_text(json.dumps(mixture))
    assert load_model(config, CPU, lambda *_: None).model


@pytest.mark.parametrize("scaling", [None, {"type": "dynamic", "factor": 4.0}, {"type": "linear", "factor": 2.0}])
def test_position_tables_are_as_long_as_the_context_that_is_served(folder: Path, scaling: dict[str, object] | None):
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "max_position_embeddings": 131072, "rope_scaling": scaling})
    )
    model = load_model(config_of(folder, max_model_len=64), CPU, lambda *_: None).model
    tables = [module.cos_sin for module in model.modules() if isinstance(module, RotaryTable)]
    assert tables and all(table.shape == (64, 8) for table in tables)


def test_executor_of_a_dummy_model_runs_plans(folder: Path):
    stages: list[tuple[str, float]] = []
    executor = build_executor(config_of(folder), lambda stage, fraction: stages.append((stage, fraction)))
    assert [f for _, f in stages] == sorted(f for _, f in stages) and stages[-1] == ("ready", 1.0)
    assert executor.config.scheduler.max_running_requests == 64 and executor.config.cache.page_size == 16
    assert (executor.layout.page_size, executor.layout.max_rows, executor.layout.max_model_len) == (16, 64, 256)
    facts = executor.facts
    assert (facts.family, facts.vocab_size, facts.num_kv_tokens, facts.eos_ids) == ("llama", 128, 39 * 16, [5, 2])
    assert facts.default_sampling == {"temperature": 0.6, "top_k": 20.0}
    assert facts.sampling_sources == dict.fromkeys(facts.default_sampling, "generation_config.json")
    assert facts.num_parameters == 128 * 32 + 2 * (32 * 64 + 32 * 32 + 32 * 96 + 48 * 32 + 2 * 32) + 32
    lines = {line.name: line.num_bytes for line in executor.memory}
    width = torch.float32.itemsize if facts.dtype == "float32" else 2
    assert lines["KV full"] == 40 * 16 * 2 * 2 * 8 * width * 2
    assert lines["weights"] >= facts.num_parameters * width
    driver = Driver(executor, num_pages=40, page_size=16, num_groups=1)
    driver.start(0, [1, 2, 3], SamplingSpec(temperature=1.0, seed=1))
    for _ in range(4):
        driver.step({0: 3})
    assert len(driver.output[0]) == 4
    executor.reset()
    executor.close()
    executor.close()


@pytest.mark.parametrize(("stated", "spread"), [
    ({}, 0.02), ({"initializer_range": 0.3}, 0.3),
    ({"text_config": {"initializer_range": 0.3}, "initializer_range": 0.02}, 0.3), ({"initializer_range": 0}, None),
])
def test_random_weights_spread_as_the_config_says(folder: Path, stated: dict, spread: float | None):
    config = config_of(folder, config_overrides=json.dumps(stated))
    if spread is None:
        with pytest.raises(ConfigError, match="initializer_range"):
            build_executor(config)
        return
    model = build_executor(config)._runner._model
    weight = model.embedding.stored.unpack(torch.float32) if model.embedding.stored else model.embedding.weight.float()
    assert float(weight.std()) == pytest.approx(spread, rel=0.1)


def test_a_failed_step_leaves_other_rows_running(folder: Path):
    executor = build_executor(config_of(folder))
    outputs = []
    for fails in (False, True):
        driver = Driver(executor, num_pages=40, page_size=16, num_groups=1)
        driver.start(0, [1, 2, 3], SamplingSpec())
        driver.step({0: 3})
        if fails:
            with pytest.raises(HeadraceError):
                executor.execute(StepPlan(7, 1, [1], [4], [1], [1])).result()
            executor.reset()
        driver.step({})
        driver.step({})
        outputs.append(driver.output[0])
        driver.release(0)
        executor.execute(driver.plan({})).result()
    assert outputs[0] == outputs[1]


def test_context_is_lowered_to_the_cache_or_refused(folder: Path):
    assert build_executor(config_of(folder, kv_pages=5)).layout.max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len 100 does not fit"):
        build_executor(config_of(folder, kv_pages=5, max_model_len=100))
    with pytest.raises(ConfigError, match="config_overrides"):
        build_executor(config_of(folder, max_model_len=500))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"page_size": 12}, "page_size"), ({"attention_backend": "nonesuch"}, "attention_backend"),
        ({"device": "tpu"}, "device"), ({"device": "cuda:77"}, "device")
    ]
)
def test_wrong_options_name_themselves(folder: Path, options: dict, param: str):
    with pytest.raises(ConfigError) as caught:
        build_executor(config_of(folder, **options))
    assert caught.value.param == param


def test_kv_dtype_and_model_dtype(folder: Path):
    executor = build_executor(config_of(folder, dtype="bfloat16", kv_dtype="float32", page_size=4))
    assert executor.facts.dtype == "bfloat16" and executor.layout.groups[0].spec.dtype == "float32"


def test_pages_of_codes_are_half_as_large_and_refused_elsewhere(folder: Path):
    executor = build_executor(config_of(folder, dtype="bfloat16", kv_dtype="int8"))
    spec = executor.layout.groups[0].spec
    assert spec.dtype == "int8"
    assert KeyValuePool.page_bytes(spec, 16) == 16 * 2 * spec.num_kv_heads * (spec.head_dim + 4)
    for wrong, device, said in (
        (spec, torch.device("cuda", 0), "for CPUs"), (msgspec.structs.replace(spec, kind="mla"), CPU, "caches mla"),
        (msgspec.structs.replace(spec, head_dim=6), CPU, "multiples of 4"),
        (msgspec.structs.replace(spec, dtype="float8_e4m3fn"), CPU, "for GPUs"),
        (msgspec.structs.replace(spec, dtype="float8_e4m3fn", kind="mla"), torch.device("cuda", 0), "caches mla"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            check_codes([None, wrong], device)
        assert caught.value.param == "kv_dtype" and "kv_dtype auto" in str(caught.value)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn"])
def test_names_of_8_bit_floats(folder: Path, name: str):
    """A CPU has no kernels for them, and says what it has."""
    with pytest.raises(ConfigError, match=r"float8_e4m3fn, which is for GPUs.*there: int8") as caught:
        build_executor(config_of(folder, kv_dtype=name))
    assert caught.value.param == "kv_dtype"
    assert KeyValuePool.reason_against(CacheSpec("full", 2, 64, 64, "float8_e4m3fn"), torch.device("cuda", 0)) is None


def test_dtype_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch):
    for is_fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(device_module, "has_fast_bfloat16", lambda is_fast=is_fast: is_fast)
        assert resolve_dtype("auto", {"torch_dtype": "bfloat16"}, CPU) == expected
        assert resolve_dtype("auto", {"dtype": "float16"}, CPU) == torch.float32
        assert resolve_dtype("auto", {"dtype": "float32"}, CPU) == torch.float32
    assert resolve_dtype("auto", {"dtype": "float16"}, CUDA) == torch.float16
    assert resolve_dtype("auto", {"text_config": {"dtype": "float16"}}, CUDA) == torch.float16
    assert resolve_dtype("auto", {}, CUDA) == torch.bfloat16
    assert resolve_dtype("float16", {"dtype": "bfloat16"}, CPU) == torch.float16
    assert isinstance(device_module.has_fast_bfloat16(), bool)


def test_activations_beside_weights_of_few_bits_are_float32(monkeypatch: pytest.MonkeyPatch):
    config, (wide, half) = {"dtype": "bfloat16"}, (torch.float32, torch.bfloat16)
    for is_fast in (True, False):
        monkeypatch.setattr(device_module, "has_fast_bfloat16", lambda is_fast=is_fast: is_fast)
        stored = half if is_fast else wide
        assert resolve_dtypes("auto", "auto", config, CPU, rounds_inputs=True) == (wide, stored)
        assert resolve_dtypes("auto", "auto", config, CPU, rounds_inputs=False) == (stored, stored)
        assert resolve_dtypes("auto", "int8", config, CPU, rounds_inputs=True) == (wide, torch.int8)
        assert resolve_dtypes("bfloat16", "auto", config, CPU, rounds_inputs=True) == (half, half)
    assert resolve_dtypes("auto", "auto", config, CUDA, rounds_inputs=True) == (half, half)


def test_a_model_in_few_bits_has_activations_in_float32(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_module, "has_fast_bfloat16", lambda: True)
    facts = build_executor(config_of(folder, quantization="int8")).facts
    assert facts.dtype == "float32"
    for coarser in ("none", "w8a8"):
        assert build_executor(config_of(folder, quantization=coarser)).facts.dtype == "bfloat16"


def test_device_names():
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("option, near", [
    ({"attention_backend": "refrence"}, "nearest: reference"), ({"moe_experts": "grouping"}, "nearest: grouped"),
    ({"all2all_backend": "alltoall"}, "nearest: all-to-all"), ({"remote_cache": "mooncakes"}, "known: mooncake"),
])
def test_names_of_plugins_are_checked_before_the_model_is_read(option: dict[str, str], near: str):
    with pytest.raises(ConfigError, match=near) as caught:
        build_executor(engine_config(model="/there/is/no/model", device="cpu", **option))
    assert caught.value.param in option


def test_replicas_take_one_gpu_after_the_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [str(resolve_device("auto", place)) for place in (0, 2)] == ["cuda:0", "cuda:2"]
    assert str(resolve_device("cuda:1", 1)) == "cuda:2" and resolve_device("cpu", 5) == CPU
    for parallel, named in (
        (ParallelConfig(tensor_parallel_size=4), "tensor_parallel_size 4 takes"),
        (ParallelConfig(data_parallel_size=3), "data_parallel_size 3 takes"),
        (ParallelConfig(tensor_parallel_size=2, data_parallel_size=2),
         "tensor_parallel_size 2 x data_parallel_size 2 takes"),
    ):
        with pytest.raises(ConfigError, match=f"cuda:3.*3 GPUs; {named}"):
            resolve_device("cuda:1", 2, parallel)


def test_threads_follow_option_then_environment(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    try:
        assert set_threads(2) == 2 == torch.get_num_threads()
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert set_threads(None) == 1 == torch.get_num_threads()
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert set_threads(None) >= 1
    finally:
        torch.set_num_threads(before)


def test_values_that_break_a_family_are_blamed_on_the_file(folder: Path):
    with pytest.raises(ConfigError, match=str(folder)):
        build_executor(config_of(folder, config_overrides=json.dumps({"hidden_act": ["silu"]})))
    write_tiny_checkpoint(folder, 1, quantization_config=4)
    with pytest.raises(ConfigError, match="quantization_config must be an object"):
        build_executor(config_of(folder, load_format="auto"))


@pytest.mark.parametrize("eos", ["x", [1, "x"], 1.5])
def test_end_of_text_ids_are_ids(folder: Path, eos: object):
    with pytest.raises(ConfigError, match="eos_token_id"):
        build_executor(config_of(folder, config_overrides=json.dumps({"eos_token_id": eos})))


@pytest.mark.parametrize(
    "options", [{"config_overrides": '{"intermediate_size": 2000000000}'}, {"kv_pages": 2**40}], ids=str
)
def test_what_does_not_fit_a_cpus_memory_is_named(folder: Path, options: dict):
    with pytest.raises(ConfigError, match="does not fit"):
        build_executor(config_of(folder, **options))


def test_model_without_numbers_is_refused_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch):
    executor = build_executor(config_of(folder))
    for parameter in executor._runner._model.parameters():
        parameter.fill_(torch.nan)
    with pytest.raises(ModelError, match="not finite"):
        warmup.run_tiny_steps(executor._runner)


def test_result_without_tokens_has_the_step_id():
    assert PendingSample(12).result().step_id == 12


def test_no_memory_for_a_step_is_a_typed_error(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine makes smaller steps of it; see the tests of the step loop. Whoever keeps the error does not keep
    tensors."""
    executor = build_executor(config_of(folder))
    tensors: list[weakref.ref[torch.Tensor]] = []

    def run_out(_: StepPlan) -> None:
        activations = torch.zeros(5)
        tensors.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(executor._runner, "execute", run_out)
    with pytest.raises(OutOfDeviceMemory, match=r"step of 5 tokens: tried to allocate 2\.00 GiB") as kept:
        executor.execute(StepPlan(0, 0, [0, 1], [0, 0], [3, 2], [1, 1]))
    assert isinstance(kept.value.__cause__, torch.OutOfMemoryError) and tensors[0]() is None
