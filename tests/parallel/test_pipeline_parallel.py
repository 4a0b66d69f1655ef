"""Pipeline stages compute what one rank does: the same tokens, logprobs alike, for every family, on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parallel.rank_processes import RankProcesses
from parallel.test_tensor_parallel import compare, compare_embeddings, draw_config
from service import random_models

FOUR = ("LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")
"""Families that four ranks serve here: tied and sliding windows, latent attention, mixtures."""


@pytest.fixture(scope="module", params=[(1, 2), (1, 4), (2, 2)], ids=lambda sizes: f"tp{sizes[0]}pp{sizes[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    made = RankProcesses(*request.param)
    yield made
    made.close()


def draw_layers(family: str, ranks: RankProcesses) -> dict[str, Any]:
    """A random configuration of a family with a layer for each stage, and one more."""
    config, layout = draw_config(family, ranks.ranks.layout.tensor), ranks.ranks.layout
    config["num_hidden_layers"] = layout.pipeline + 1
    if "layer_types" in config:  # one kind is on one stage alone
        config["layer_types"] = ["sliding_attention", *["full_attention"] * layout.pipeline]
    return config


@pytest.mark.parametrize("family", [*random_models.DENSE, *random_models.MIXTURES])
def test_tokens_of_stages_are_those_of_one_rank(
    ranks: RankProcesses, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if ranks.size > 2 and family not in FOUR:
        pytest.skip("four ranks serve four families here")
    layout = ranks.ranks.layout
    sizes = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    compare(ranks, draw_layers(family, ranks), tmp_path, monkeypatch, **sizes)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification"])
def test_an_encoder_has_stages_as_well(
    ranks: RankProcesses, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    layout = ranks.ranks.layout
    sizes = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    compare_embeddings(ranks, architecture, tmp_path, monkeypatch, num_layers=layout.pipeline, **sizes)
