"""Sampling defaults: what a model states, in files of either kind, and what the user sets over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from headrace.base.config import ModelConfig, engine_config
from headrace.base.errors import ConfigError
from headrace.base.generation import parse_generation_override
from headrace.models import generation
from headrace.models.generation import find_sampling_defaults, read_sampling_defaults
from headrace.models.source import ModelSource

FLAG = "--override-generation-config"


def defaults_of(
    stated: dict[str, Any], metadata: dict[str, Any] | None = None, override: str | None = None
) -> dict[str, tuple[int | float, str]]:
    source = ModelSource("m", "folder", Path("."), {}, stated, gguf_metadata=metadata or {})
    found = read_sampling_defaults(source, ModelConfig(override_generation_config=override))
    return {name: (default.value, default.source) for name, default in found.items()}


def test_the_file_of_a_checkpoint_states_numbers():
    stated = {
        "top_p": 0.9, "top_k": 50.0, "temperature": None, "min_p": True, "repetition_penalty": 1.1, "max_length": 20
    }
    found = defaults_of(stated)
    assert found == {
        "top_p": (0.9, "generation_config.json"), "top_k": (50, "generation_config.json"),
        "repetition_penalty": (1.1, "generation_config.json")
    }
    assert type(found["top_k"][0]) is int


def test_what_no_request_may_have_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture):
    wrong = {"top_p": 7, "temperature": float("nan"), "repetition_penalty": -1, "top_k": float("inf"), "min_p": 0.5}
    assert list(defaults_of(wrong)) == ["min_p"]
    assert list(defaults_of({}, {"general.sampling.temp": -1.0, "general.sampling.top_k": 5})) == ["top_k"]
    assert "generation_config.json: top_p must be" in caplog.text
    assert "general.sampling.temp: temperature must be" in caplog.text


def test_keys_of_a_gguf_file_as_its_package_writes_them(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_p(0.95)
    writer.add_sampling_top_k(20)
    writer.add_sampling_min_p(0.05)
    writer.add_sampling_penalty_repeat(1.05)
    writer.add_sampling_mirostat(0)
    writer.add_sampling_sequence("top_k;top_p")
    writer.add_context_length(64), writer.add_embedding_length(32), writer.add_block_count(1)
    writer.add_feed_forward_length(64), writer.add_head_count(2), writer.add_vocab_size(8)
    writer.add_token_list(["a"] * 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = find_sampling_defaults(ModelConfig(model=str(tmp_path / "m.gguf")))
    assert {name: default.value for name, default in found.items()} == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05
    }
    assert found["temperature"].source == "general.sampling.temp"
    # a file beside it is the user's to edit, and wins
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3}')
    found = find_sampling_defaults(ModelConfig(model=str(tmp_path / "m.gguf")))
    assert (found["temperature"].value, found["top_k"].value) == (0.3, 20)


def test_the_default_package_samples_as_its_makers_advise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    default = ModelConfig().model
    package = tmp_path / default / "model.gguf"

    def source_at(path: Path, name: str, stated: dict[str, Any] | None = None) -> ModelSource:
        return ModelSource(name, "gguf", path, {}, stated or {})

    def read(source: ModelSource, override: str | None = None) -> dict[str, tuple[int | float, str]]:
        found = read_sampling_defaults(source, ModelConfig(override_generation_config=override))
        return {name: (one.value, one.source) for name, one in found.items()}

    is_same = {default, default.replace("_", "-"), default.upper()}
    monkeypatch.setattr(generation, "find_package", lambda name: package if name in is_same else None)
    advised = {"temperature": (0.2, "advice of the model's makers"), "top_p": (0.9, "advice of the model's makers")}
    for name in is_same:
        assert read(source_at(package, name)) == advised
    assert read(source_at(package, default, {"top_p": 0.8})) == {
        **advised, "top_p": (0.8, "generation_config.json")
    }
    assert read(source_at(package, default), '{"temperature": 1}') == {**advised, "temperature": (1.0, FLAG)}
    assert read(source_at(tmp_path / "mine" / default, default)) == {}  # another model under that name
    assert read(source_at(package, "another")) == {}


def test_the_users_fields_win_and_leave_the_others():
    found = defaults_of(
        {"temperature": 1.0, "top_k": 20}, {"general.sampling.top_p": 0.5},
        '{"temperature": 0.2, "presence_penalty": 1}'
    )
    assert found == {
        "temperature": (0.2, FLAG), "top_k": (20, "generation_config.json"), "top_p": (0.5, "general.sampling.top_p"),
        "presence_penalty": (1.0, FLAG)
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"), ("[]", "must be a JSON object"), ('{"temprature": 1}', "did you mean temperature"),
        ('{"TOP_P": 1}', "did you mean top_p"),
        ('{"max_new_tokens": 3}', "known: temperature, top_k"), ('{"top_p": 2}', "top_p must be at least"),
        ('{"temperature": "0.2"}', "finite number"), ('{"top_k": 1.5}', "whole number"), ('{"top_k": true}', "number"),
        ('{"temperature": NaN}', "finite number"), ('{"temperature": null}', "finite number"),
    ]
)
def test_wrong_overrides_are_refused_before_anything_is_loaded(text: str, message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        ModelConfig(override_generation_config=text)
    assert raised.value.param == "override_generation_config"


def test_json_options_may_be_dicts_in_python():
    config = engine_config(override_generation_config={"top_k": 3}, config_overrides={"hidden_act": "silu"})
    assert parse_generation_override(config.model.override_generation_config) == {"top_k": 3}
    assert json.loads(config.model.config_overrides or "") == {"hidden_act": "silu"}
