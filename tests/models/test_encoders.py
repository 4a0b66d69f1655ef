"""Encoders against transformers on tiny random configs in float32: hidden states, and the logits of classifiers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from headrace.base.errors import ConfigError, WeightError
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.encoder import group_lengths
from headrace.models.catalog import find_family

VOCAB = 97
LENGTHS = (5, 7, 6, 20, 1, 30, 6)
BERT = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
ROBERTA = {**BERT, "pad_token_id": 1, "type_vocab_size": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", BERT),
    "bert-tanh-gelu": ("BertModel", {**BERT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert-relu-odd-heads": ("BertModel", {**BERT, "hidden_act": "relu", "num_attention_heads": 3}),
    "bert-classes": ("BertForSequenceClassification", {**BERT, "num_labels": 5}),
    "bert-cross-encoder": ("BertForSequenceClassification", {**BERT, "num_labels": 1}),
    "roberta": ("RobertaModel", ROBERTA),
    "roberta-classes": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 3}),
    "xlm-roberta": ("XLMRobertaModel", {**ROBERTA, "pad_token_id": 3}),
    "xlm-roberta-cross-encoder": ("XLMRobertaForSequenceClassification", {**ROBERTA, "num_labels": 1}),
}


def build_pair(name: str) -> tuple[Any, Any]:
    """transformers' model and ours with the same weights."""
    architecture, fields = CASES[name]
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    theirs = cls(cls.config_class(**fields)).eval()
    ours = build_ours({**theirs.config.to_dict(), "architectures": [architecture]})
    ours.load_weights(theirs.state_dict().items())
    return theirs, ours


def build_ours(config: dict[str, Any]) -> Any:
    family = find_family(config["architectures"][0])
    return family.build_model(family.read_config(config), Build(torch.device("cpu"), torch.float32))


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_texts_equals_each_text_alone(name: str):
    theirs, ours = build_pair(name)
    texts = [random.Random(i).choices(range(4, VOCAB), k=length) for i, length in enumerate(LENGTHS)]
    kinds = [[int(place > len(text) // 2) for place in range(len(text))] for text in texts]
    has_kinds = theirs.config.type_vocab_size > 1
    batch = ForwardBatch(
        torch.tensor([t for text in texts for t in text]),
        torch.tensor([p for text in texts for p in range(len(text))]), [], list(LENGTHS),
        torch.tensor([k for kind in kinds for k in kind]) if has_kinds else None,
    )
    with torch.inference_mode():
        for text, kind, states in zip(texts, kinds, ours(batch).split(LENGTHS), strict=True):
            expected = theirs(torch.tensor([text]), token_type_ids=torch.tensor([kind]) if has_kinds else None)
            if ours.scores is None:
                torch.testing.assert_close(states, expected.last_hidden_state[0], atol=1e-5, rtol=1e-5)
            else:
                torch.testing.assert_close(ours.scores(states[:1]), expected.logits, atol=1e-5, rtol=1e-5)


def test_texts_of_like_length_go_together():
    groups = group_lengths([10, 3, 12, 10, 100, 3])
    assert groups == [[1, 5], [0, 3, 2], [4]]


def test_files_with_training_heads_and_old_names_load():
    torch.manual_seed(0)
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).eval()
    config = {**theirs.config.to_dict(), "architectures": ["BertForMaskedLM"]}
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t for name,
        t in theirs.state_dict().items()
    }
    ours = build_ours(config)
    ours.load_weights({**tensors, "bert.embeddings.position_ids": torch.arange(64)}.items())
    ids = torch.tensor([4, 9, 33, 8])
    with torch.inference_mode():
        expected = theirs.bert(ids[None]).last_hidden_state[0]
        torch.testing.assert_close(ours(ForwardBatch(ids, torch.arange(4), [], [4])), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(WeightError, match=r"bert.extra|extra"):
        build_ours(config).load_weights({**tensors, "bert.extra.weight": torch.zeros(1)}.items())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"), ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "hidden_size"), ({"hidden_act": "xielu"}, "hidden_act")
    ],
)
def test_what_is_not_served_is_named(changed: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        find_family("BertModel").read_config({**BERT, "architectures": ["BertModel"], **changed})


def test_context_leaves_out_positions_without_a_token():
    assert find_family("BertModel").read_config({**BERT, "architectures": ["BertModel"]}).max_model_len == 64
    assert find_family("RobertaModel").read_config({**ROBERTA, "architectures": ["RobertaModel"]}).max_model_len == 62
