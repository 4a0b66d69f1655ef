"""Models built in pipeline stages: each takes its layers' tensors of a checkpoint, and together they have the whole."""

from __future__ import annotations

import random as randomness
from typing import Any

import pytest
import torch
from service import random_models

from headrace.base.errors import WeightError
from headrace.layers.build import Build
from headrace.layers.loading import find_targets
from headrace.layers.model import ServedModel
from headrace.layers.names import SCORE_NAMES
from headrace.models.catalog import find_family
from headrace.models.weights.dummy import fill_dummy_weights
from headrace.parallel.layout import Stage, stage_of

CPU = torch.device("cpu")
BERT: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 97, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 64,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}


def draw_config(family: str) -> dict[str, Any]:
    """A random configuration of a family, of three layers."""
    for seed in range(10_000):
        config = random_models.draw_config(randomness.Random(seed))
        if config["architectures"] == [family] and config["num_hidden_layers"] == 3:
            return config
    raise AssertionError(f"no seed draws {family}")


def build_model(config: dict[str, Any], stage: Stage = Stage()) -> ServedModel:  # noqa: B008 (frozen)
    family = find_family(config["architectures"][0])
    model = family.build_model(family.read_config(config), Build(CPU, torch.float32, stage=stage))
    fill_dummy_weights(model, 3)
    return model


def list_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Tensors as a checkpoint has them."""
    modules = {**model.names.modules, **SCORE_NAMES}
    if getattr(model, "head", None) is not None and model.spec.vocabulary.tied:
        modules = {theirs: ours for theirs, ours in modules.items() if ours != "head"}
    return {name: t.detach().clone() for name, t in find_targets(model, modules).items()}


@pytest.mark.parametrize("counts", [(2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("family", [*random_models.DENSE, *random_models.MIXTURES, "BertForSequenceClassification"])
def test_stages_have_the_weights_of_the_whole(family: str, counts: tuple[int, ...]):
    config = BERT if family.startswith("Bert") else draw_config(family)
    whole = build_model(config)
    expected, checkpoint, taken = dict(whole.named_parameters()), list_tensors(whole), set[str]()
    seen: set[str] = set()
    for number in range(len(counts)):
        stage = build_model(config, stage_of(counts, number))
        random = dict(stage.named_parameters())
        assert random and all(torch.equal(parameter, expected[name]) for name, parameter in random.items())
        for parameter in random.values():
            parameter.data.fill_(7)
        wanted = {name: tensor for name, tensor in checkpoint.items() if stage.wants(name)}
        stage.load_weights(wanted.items())
        assert all(torch.equal(parameter, expected[name]) for name, parameter in stage.named_parameters())
        taken |= wanted.keys()
        seen |= random.keys()
    assert taken == checkpoint.keys() and seen == expected.keys()


def test_a_stage_still_refuses_what_belongs_to_no_stage():
    config = draw_config("LlamaForCausalLM")
    checkpoint = list_tensors(build_model(config))
    for number in range(2):
        stage = build_model(config, stage_of((2, 1), number))
        assert stage.wants("model.odd.weight") and stage.wants("model.layers.9.mlp.up_proj.weight")
        wanted = [(name, tensor) for name, tensor in checkpoint.items() if stage.wants(name)]
        with pytest.raises(WeightError, match="odd"):
            stage.load_weights([*wanted, ("model.odd.weight", torch.ones(1))])


def test_only_the_ends_have_vocabularies():
    config = {**draw_config("LlamaForCausalLM"), "tie_word_embeddings": False}
    names = [
        {name.partition(".")[0] for name, _ in build_model(config, stage_of((1, 1, 1), number)).named_parameters()}
        for number in range(3)
    ]
    assert names == [{"embedding", "layers"}, {"layers"}, {"layers", "norm", "head"}]
    tied = build_model({**config, "tie_word_embeddings": True}, stage_of((2, 1), 1))
    assert {name.partition(".")[0] for name, _ in tied.named_parameters()} == {"embedding", "layers", "norm"}
