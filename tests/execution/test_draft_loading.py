"""Which drafter the automatic choice takes, and what is refused at the start: what concerns the drafter as well as what
concerns the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from draft_checkpoints import ONE_FILE, make_head, write, write_head, write_target
from tiny_checkpoint import write_tiny_checkpoint

from headrace import LLM, SamplingParams
from headrace.base.config import engine_config, resolve_for_device
from headrace.base.errors import ConfigError, HeadraceError, ModelError
from headrace.base.registry import Registry
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor
from headrace.models.drafters import contract
from headrace.models.source import ModelSource

BASE = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kv_pages": 100, "page_size": 4, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and in ``head`` below it a head."""
    folder = tmp_path_factory.mktemp("target")
    write_head(folder / "head", write_target(folder, "Llama"), "one file")
    return folder


def build(folder: Path, config: dict[str, Any], **options: Any) -> LocalExecutor:
    stated = {**BASE, **options, "speculative_config": json.dumps(config)}
    return build_executor(resolve_for_device(engine_config(model=str(folder), **stated), "cpu"))


def source(**config: Any) -> ModelSource:
    return ModelSource("x", "folder", Path(), {"architectures": ["SomeForCausalLM"], **config})


@pytest.mark.parametrize(("config", "own", "expected"), [
    ({"architectures": ["LlamaForCausalLMEagle3"]}, True, "eagle3"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, True, "eagle3"),
    ({"architectures": ["SpeculatorModel"], "speculators_model_type": "eagle3"}, True, "eagle3"),
    ({}, True, "draft_model"), ({}, False, None), ({"num_nextn_predict_layers": 0}, False, None),
    ({"num_nextn_predict_layers": 1}, False, "mtp"), ({"num_mtp_layers": 2}, False, "mtp"),
    ({"mtp_num_hidden_layers": 1}, False, "mtp"), ({"num_nextn_predict_layers": 1}, True, "draft_model"),
])
def test_kinds_say_which_checkpoints_they_fit(config: dict[str, Any], own: bool, expected: str | None):
    assert contract.choose_draft_kind(source(**config), has_checkpoint=own) == expected


OUTSIDE = '''
from headrace.models.drafters.contract import DraftKind
from headrace.models.drafters.own_model import OWN_MODEL

class Mine(DraftKind):
    plugin_api = 1
    has_checkpoint = {own}
    def fits(self, source):
        return "mine" in source.config
    def build_model(self, query):
        return OWN_MODEL.build_model(query)

MINE = Mine()
'''


def test_kinds_of_other_packages_are_chosen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    """Before a model of any architecture; one that is broken is left out and told."""
    for own in (True, False):
        (tmp_path / f"fitting_{own}.py".lower()).write_text(OUTSIDE.replace("{own}", str(own)))
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = ["whole = fitting_true:MINE", "part = fitting_false:MINE", "broken = no_such_module:MINE"]
    (info / "entry_points.txt").write_text("\n".join(["[headrace.draft_models]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[contract.DraftKind] = Registry("drafter")
    for entry in contract.DRAFT_KINDS:
        registry.add(entry.name, entry.target, priority=entry.priority)
    monkeypatch.setattr(contract, "DRAFT_KINDS", registry)
    assert contract.choose_draft_kind(source(mine=1), has_checkpoint=True) == "whole"
    assert contract.choose_draft_kind(source(mine=1), has_checkpoint=False) == "part"
    assert contract.choose_draft_kind(source(), has_checkpoint=True) == "draft_model"
    assert "no_such_module" in caplog.text
    target = write_tiny_checkpoint(tmp_path / "target", 3, mine=1)
    executor = build(target, {"method": "auto", "model": str(target)}, skip_tokenizer=True)
    assert executor.speculation.method == "whole"


def test_a_module_that_is_not_served_leaves_the_automatic_choice_to_text(tmp_path: Path, caplog: Any):
    folder = write_tiny_checkpoint(tmp_path, 3, num_nextn_predict_layers=1)
    assert build(folder, {"method": "auto"}, skip_tokenizer=True).speculation.method == "suffix"
    assert "the model's own drafter is not used" in caplog.text


def test_a_drafters_cache_is_checked_as_the_models_is(tmp_path: Path):
    """Codes of 8 bits: the model's keys fit, the drafter's do not."""
    target = write_tiny_checkpoint(tmp_path / "target", 3)
    odd = write_tiny_checkpoint(tmp_path / "odd", 4, hidden_size=40)  # heads of 10
    latent = tmp_path / "latent"
    write_target(latent, "DeepseekV3")
    options = {"kv_dtype": "int8", "skip_tokenizer": True}
    build(target, {"method": "draft_model", "model": str(target)}, **options)
    with pytest.raises(ConfigError, match=r"the drafter odd cannot .* multiples of 4, not 10") as caught:
        build(target, {"method": "draft_model", "model": str(odd)}, **options)
    assert caught.value.param == "speculative_config"
    build(target, {"method": "draft_model", "model": str(odd)}, skip_tokenizer=True)
    model = write_tiny_checkpoint(tmp_path / "wide", 3, vocab_size=300)
    with pytest.raises(ConfigError, match=r"the drafter latent cannot .* plain keys and values, and it caches mla"):
        build(model, {"method": "draft_model", "model": str(latent)}, **options)


@pytest.mark.parametrize(("options", "told"), [
    ({"quantization": "fp9"}, "quantization must be one of"), ({"load_format": "gguf"}, "load_format is gguf"),
    ({"model": "/nowhere"}, "/nowhere"), ({"method": "auto", "model": "/nowhere"}, "/nowhere"),
    ({"method": "auto", "quantization": "fp9"}, "'fp9'"),
    ({"method": "mtp", "model": None}, "no multi-token prediction"),
], ids=str)
def test_what_is_wrong_with_a_drafter_is_not_said_of_the_model(options: dict[str, Any], told: str, tmp_path: Path):
    folder = write_tiny_checkpoint(tmp_path / "target", 3)
    config = {"method": "draft_model", "model": str(write_tiny_checkpoint(tmp_path / "drafter", 4)), **options}
    with pytest.raises(HeadraceError, match=told) as caught:
        build(folder, {name: value for name, value in config.items() if value is not None}, skip_tokenizer=True)
    assert caught.value.param == "speculative_config"
    is_named = "drafter" in str(caught.value) or "speculative method" in str(caught.value)
    assert is_named and isinstance(caught.value, (ConfigError, ModelError))


def test_a_quantised_drafter_is_right_now_and_then(tmp_path: Path):
    """And the model itself keeps its weights as they are."""
    folder = tmp_path / "target"
    write_target(folder, "Llama")
    config = {"method": "draft_model", "model": str(folder), "quantization": "int8", "num_speculative_tokens": 3}
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = []
    for stated in ({"method": "off"}, config):
        with LLM(str(folder), **BASE, speculative_config=stated) as llm:
            outputs.append(llm.generate(prompt_token_ids=[[5, 6, 7], [9] * 20], sampling_params=params))
            counters = llm.stats().speculation
    plain, drafted = ([output.outputs[0].token_ids for output in both] for both in outputs)
    assert drafted == plain and counters.num_accepted_tokens > counters.num_draft_tokens / 2


def test_layers_of_a_drafter_that_no_backend_serves(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from headrace.layers.attention import ATTENTION_BACKENDS

    def only_two_heads(geometry: Any) -> str | None:
        return None if geometry.num_kv_heads == 2 else "takes two heads"

    monkeypatch.setattr(ATTENTION_BACKENDS, "_entries", {})
    ATTENTION_BACKENDS.add("two", "headrace.layers.attention.reference:ReferenceAttention", supports=only_two_heads)
    build(folder, {"method": "eagle3", "model": str(folder / "head")})
    other = {**ONE_FILE, "num_key_value_heads": 4, "architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text(json.dumps(other))
    config = {"method": "eagle3", "model": str(folder / "other"), "load_format": "dummy"}
    with pytest.raises(ConfigError, match=r"layers of the drafter cannot be served.*takes two heads") as caught:
        build(folder, config)
    assert caught.value.param == "speculative_config"


def test_a_drafter_of_a_shorter_context_is_told(tmp_path: Path, caplog: Any):
    model = write_target(tmp_path / "target", "Llama")
    head = write(tmp_path / "head", {**ONE_FILE, "max_position_embeddings": 64}, make_head(model))
    config = {"method": "eagle3", "model": str(head)}
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "target", config, max_model_len=64)
        assert "made for" not in caplog.text
        build(tmp_path / "target", config)
    assert "the drafter head was made for 64 tokens of context, and 128 are served" in caplog.text


def test_pooling_models_take_no_drafts(tmp_path: Path):
    folder = write_tiny_checkpoint(tmp_path, 3)
    options = {"task": "embed", "skip_tokenizer": True}
    assert build(folder, {"method": "auto"}, **options).speculation.method == "off"
    for config in ({"method": "ngram"}, {"method": "draft_model", "model": str(folder)}, {"method": "mtp"}):
        with pytest.raises(HeadraceError, match=r"pooling model .*generates no text"):
            build(folder, config, **options)
