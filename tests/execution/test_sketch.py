"""A sketch of a model: its steps run, in little memory, and are those of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.deepseek_v4 import read_config
from headrace.base.config import engine_config, resolve_for_device
from headrace.execution import sketch, warmup
from headrace.execution.assembly import Assembly
from headrace.execution.building import build_executor
from headrace.execution.loading import LoadedModel, load_model
from headrace.layers.quantization.storage import count_bytes, find_stored
from headrace.models.source import resolve_source
from headrace.parallel.group import TorchGroup
from headrace.parallel.layout import Layout
from headrace.parallel.ranks import Ranks

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "eos_token_id": 2,
}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}


def load(folder: Path, config: dict[str, object], *, lends: bool) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(config))
    options = engine_config(model=str(folder), load_format="dummy", device="cpu", dtype="bfloat16")
    return load_model(options, CPU, lambda *_: None, fill=sketch.lend_weights if lends else None)


def distinct_bytes(loaded: LoadedModel) -> int:
    tensors = (*loaded.model.parameters(), *loaded.model.buffers())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_weights_of_one_shape_share_memory(tmp_path: Path) -> None:
    """Of V4 with MXFP4 experts: the sketch has the forms of the model, in the memory of a layer."""
    config = {**read_config(tiny=True), "max_position_embeddings": 512, "num_hidden_layers": 20}
    model, own = load(tmp_path, config, lends=False), load(tmp_path, config, lends=True)
    forms = [
        [(name, tuple(t.shape), t.dtype) for name, t in (*a.named_parameters(), *a.named_buffers())]
        for a in (model.model, own.model)
    ]
    assert forms[0] == forms[1] and count_bytes(own.model) == count_bytes(model.model)
    assert distinct_bytes(own) < distinct_bytes(model) / 2


@pytest.mark.parametrize("expert_dtype", [None, "fp4"])
def test_places_for_copies_share_memory_too(expert_dtype: str | None, tmp_path: Path) -> None:
    """Of one of two ranks between which experts move: more places than experts, in the memory of a layer's."""
    config = {
        **read_config(tiny=True), "max_position_embeddings": 512, "num_hidden_layers": 6, "expert_dtype": expert_dtype,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    group = TorchGroup(1, 2, CPU)  # its calls fail, as no process group was made
    options = engine_config(
        model=str(tmp_path), load_format="dummy", device="cpu", dtype="bfloat16", tensor_parallel_size=2,
        enable_expert_parallel=True, enable_eplb=True, eplb_config='{"num_redundant_experts": 4}',
    )
    ranks = Ranks(Layout(1, tensor=2), group, group)
    for lends in (False, True):
        loaded = load_model(options, CPU, lambda *_: None, ranks, fill=sketch.lend_weights if lends else None)
        stacks = [layer.mlp.experts.down for layer in loaded.model.layers.children()]
        tensors = [stack.codes if expert_dtype else stack.weight for stack in stacks]
        assert {len(tensor) for tensor in tensors} == {(config["n_routed_experts"] + 4) // 2}
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == (1 if lends else len(tensors))
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_layers_of_a_kind_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the ends; the others do nothing, without harm."""
    config = {**LLAMA, "num_hidden_layers": 9, "sliding_window": 32, "use_sliding_window": True}
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 5}
    own = load(tmp_path, config, lends=True)
    ran: list[int] = []
    for i, layer in enumerate(own.model.get_submodule("layers").children()):
        layer.register_forward_hook(lambda module, *_, i=i: "forward" in vars(module) or ran.append(i))
    monkeypatch.setattr(type(own.model), "_run_together", lambda *_: None)  # the native call for CPUs
    options = engine_config(model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16)
    assembly = Assembly.of(resolve_for_device(options, "cpu"), own, CPU)
    with warmup.few_layers(own.model):
        with warmup.few_layers(own.model):
            pass  # what is left out stays so until the outer end
        warmup.run_tiny_steps(assembly.build_small_runner())
    kinds = own.model.layer_kinds
    assert kinds[0] == kinds[4] != kinds[5] == kinds[8]
    assert set(ran) == {0, 1, 5, 6, 7, 8}
    warmup.run_tiny_steps(assembly.build_small_runner())
    assert set(ran) == set(range(9))


def test_codes_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in the form that the config states are quantised once for each shape."""
    asked: list[tuple[int, ...]] = []
    real = sketch.Storing.store

    def store(self: sketch.Storing, parameter: torch.nn.Parameter) -> None:
        asked.append(tuple(parameter.shape))
        real(self, parameter)

    monkeypatch.setattr(sketch.Storing, "store", store)
    own = load(tmp_path, {**LLAMA, **GPTQ}, lends=True)
    assert len(asked) == 4 * 6 + 2 and len(find_stored(own.model)) == 2 + 2, "two shapes, embedding and head"


def test_a_start_compiles_for_its_sketch_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the sketch run, are finite and ask for the kernels of the model; the model is loaded in the body."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    happened: list[str] = []

    @contextmanager
    def ahead(run: Callable[[], None], about: str, device: torch.device) -> Iterator[None]:
        happened.append("ahead")
        run()
        happened.append("body")
        yield
        happened.append("end")

    def precompile(run: Callable[[], None], about: str, device: torch.device) -> int:
        happened.append(about)
        run()
        return 1

    monkeypatch.setattr(sketch, "compile_ahead", ahead)
    monkeypatch.setattr(sketch, "can_sketch", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(warmup, "precompile", precompile)
    options = engine_config(model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16)
    build_executor(options).close()
    assert [happened[i] for i in (0, 2, 4)] == ["ahead", "body", "end"] and len(happened) == 5
    assert happened[1] == happened[3], "nothing is looked for twice"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_rank_sketches_without_the_others(architecture: str, tmp_path: Path) -> None:
    """Whom nobody answers, and who would wait for nothing."""
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {**LLAMA, "architectures": [architecture], "head_dim": 16, **(mixture if "Moe" in architecture else {})}
    if mixture.keys() <= config.keys():
        config["model_type"] = "qwen3_moe"
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = resolve_for_device(engine_config(
        model=str(tmp_path), load_format="dummy", device="cpu", kv_pages=16, tensor_parallel_size=2
    ), "cpu")
    group = TorchGroup(1, 2, CPU)  # its calls fail, as no process group was made
    ran: list[Assembly] = []

    def assemble(loaded: LoadedModel) -> Assembly:
        ran.append(Assembly.of(options, loaded, CPU))
        warmup.run_tiny_steps(ran[0].build_small_runner())
        return ran[0]

    sketch.run_sketch(options, CPU, Ranks(Layout(1, tensor=2), group, group), assemble)
    assert ran and not group._is_muted
    assert sketch.can_sketch(options, torch.device("cuda"))


def test_unknown_forms_are_not_sketched(tmp_path: Path) -> None:
    """Kernels for plain weights would be compiled in vain."""
    for method, is_known in (("fp8", True), ("gptq", True), ("exotic", False), (None, True)):
        config = {**LLAMA, **({"quantization_config": {"quant_method": method}} if method else {})}
        (tmp_path / "config.json").write_text(json.dumps(config))
        source = resolve_source(engine_config(model=str(tmp_path), load_format="dummy").model)
        assert sketch._has_known_form(source) == is_known
