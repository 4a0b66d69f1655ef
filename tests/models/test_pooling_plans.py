"""What a folder says of how texts are read: sentence-transformers' files, classifiers' fields, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, ModelError
from headrace.models.catalog import find_family
from headrace.models.pooling import DenseLayer, PoolingPlan, config_for, plan_pooling, read_task
from headrace.models.source import ModelSource

TYPE = "sentence_transformers.models."


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def sentence_folder(folder: Path, pooling: dict[str, Any], *more: tuple[str, str]) -> None:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *more]
    write(
        folder, "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": TYPE + kind} for i, (path, kind) in enumerate(modules)]
    )
    write(folder, "1_Pooling/config.json", pooling)


def plan(folder: Path, architecture: str, task: str = "auto", **config: Any) -> PoolingPlan | None:
    source = ModelSource("m", "folder", folder, {"architectures": [architecture], **config})
    family = find_family(architecture)
    return plan_pooling(source, family, read_task(source, family, task))


def test_folder_of_sentence_transformers(tmp_path: Path):
    sentence_folder(
        tmp_path, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("2_Dense", "Dense"),
        ("3_Normalize", "Normalize")
    )
    write(
        tmp_path, "2_Dense/config.json",
        {"in_features": 8, "out_features": 4, "bias": False, "activation_function": "torch.nn.modules.activation.Tanh"}
    )
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 77})
    found = plan(tmp_path, "BertModel")
    assert found == PoolingPlan("embed", "mean", True, (DenseLayer(8, 4, False, "tanh", tmp_path / "2_Dense"),), 77)
    assert (found.facts(8).width, found.facts(8).needs_all_tokens) == (4, True)


@pytest.mark.parametrize(
    ("mode", "reduction"),
    [("pooling_mode_cls_token", "first"), ("pooling_mode_lasttoken", "last"), ("pooling_mode_max_tokens", "max")]
)
def test_pooling_modes(tmp_path: Path, mode: str, reduction: str):
    sentence_folder(tmp_path, {mode: True})
    found = plan(tmp_path, "Qwen3ForCausalLM")
    assert (
        found.reduction, found.normalise, found.facts(4).needs_all_tokens
    ) == (reduction, False, reduction != "last")
    sentence_folder(tmp_path, {"pooling_mode": "cls"})
    assert plan(tmp_path, "BertModel").reduction == "first"


def test_without_files_encoders_take_the_mean_and_decoders_the_last(tmp_path: Path):
    assert plan(tmp_path, "XLMRobertaModel") == PoolingPlan("embed", "mean", True)
    assert plan(tmp_path, "Qwen2Model") == PoolingPlan("embed", "last", True)
    assert plan(tmp_path, "LlamaForCausalLM", "embed") == PoolingPlan("embed", "last", True)
    assert plan(tmp_path, "LlamaForCausalLM") is None
    assert plan(tmp_path, "BertModel", pooling="cls").reduction == "first"


@pytest.mark.parametrize(("stated", "reduction"), [(1, "mean"), (2, "first"), (3, "last"), (0, None), (None, None)])
def test_gguf_files_state_their_pooling(tmp_path: Path, stated: int | None, reduction: str | None):
    metadata = {"general.architecture": "qwen3"} | ({} if stated is None else {"qwen3.pooling_type": stated})
    source = ModelSource(
        "m", "gguf", tmp_path / "m.gguf", {"architectures": ["Qwen3ForCausalLM"]}, gguf_metadata=metadata
    )
    family = find_family("Qwen3ForCausalLM")
    found = plan_pooling(source, family, read_task(source, family, "auto"))
    assert found == (None if reduction is None else PoolingPlan("embed", reduction, True))


def test_an_embedder_is_built_without_the_head(tmp_path: Path):
    source = ModelSource("m", "folder", tmp_path, {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 9})
    assert config_for(source, "embed") == {"architectures": ["Qwen3Model"], "vocab_size": 9}
    assert config_for(source, "generate") is source.config


@pytest.mark.parametrize(
    ("config", "activation", "labels"),
    [
        ({"id2label": {"1": "bad", "0": "good"}}, "softmax", ("good", "bad")),
        ({}, "softmax", ("LABEL_0", "LABEL_1")),
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid", ("LABEL_0",)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid", ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"num_labels": 1, "problem_type": "regression"}, "identity", ("LABEL_0",)),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity", ("LABEL_0",)
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid",
            ("LABEL_0",)
        ),
    ],
)
def test_classifiers(tmp_path: Path, config: dict[str, Any], activation: str, labels: tuple[str, ...]):
    found = plan(tmp_path, "BertForSequenceClassification", **config)
    assert (
        found.kind, found.reduction, found.activation, found.labels, found.takes_pairs
    ) == ("classify", "first", activation, labels, True)
    found = plan(tmp_path, "Qwen3ForSequenceClassification", **config)
    assert (found.reduction, found.labels, found.takes_pairs) == ("last", labels, False)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "generate"), ("BertModel", "classify"), ("BertForSequenceClassification", "embed"),
        ("LlamaForCausalLM", "classify"), ("LlamaModel", "generate")
    ],
)
def test_tasks_a_checkpoint_cannot_do(tmp_path: Path, architecture: str, task: str):
    with pytest.raises(ConfigError, match="task must be"):
        plan(tmp_path, architecture, task)


def test_what_is_not_served_is_named(tmp_path: Path):
    sentence_folder(tmp_path, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})
    with pytest.raises(ConfigError, match="one pooling mode"):
        plan(tmp_path, "BertModel")
    sentence_folder(tmp_path, {"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(ConfigError, match="weightedmean"):
        plan(tmp_path, "BertModel")
    sentence_folder(tmp_path, {"pooling_mode_cls_token": True}, ("2_LSTM", "LSTM"))
    with pytest.raises(ConfigError, match="LSTM"):
        plan(tmp_path, "BertModel")
    sentence_folder(tmp_path, {"pooling_mode_cls_token": True}, ("../outside", "Dense"))
    with pytest.raises(ModelError, match="outside"):
        plan(tmp_path, "BertModel")
    (tmp_path / "modules.json").write_text('{"not": "a list"}')
    with pytest.raises(ModelError, match="list of modules"):
        plan(tmp_path, "BertModel")
