"""Models that ranks cannot divide are refused by their configuration alone, before any rank is started."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.test_tensor_parallel import DEEPSEEK_V4
from service import random_models, tiny_whisper

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError
from headrace.layers.build import Build
from headrace.models.catalog import find_family
from headrace.models.reading import check_layout
from headrace.parallel.division import Division
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group
from headrace.service.ranks import starting

BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 64, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64,
}
MIXTURE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
EXPERTS = {"enable_expert_parallel": True}


class Rank(Group):
    """One of a group without the others."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def build_all(config: dict[str, Any], size: int, *, has_experts: bool) -> str | None:
    """What speaks against building the model for each of ``size`` ranks."""
    family = find_family(config["architectures"][0])
    try:
        for rank in range(size):
            group = Rank(rank, size)
            experts = ExpertRanks(group if has_experts else Group())
            build = Build(torch.device("meta"), torch.float32, 64, tensor=group, experts=experts)
            family.build_model(family.read_config(config), build)
    except ConfigError as error:
        return str(error)
    return None


def check(config: dict[str, Any], division: Division) -> str | None:
    family = find_family(config["architectures"][0])
    try:
        family.read_config(config).check_division(division)
    except ConfigError as error:
        return str(error)
    return None


def test_what_cannot_be_built_is_refused_and_nothing_else(tmp_path: Path):
    draw, found = random.Random(2), []
    whisper = json.loads((tiny_whisper.write_whisper(tmp_path / "whisper") / "config.json").read_text())
    configs = [random_models.draw_config(draw) for _ in range(60)]
    configs += [{**DEEPSEEK_V4, "o_groups": groups} for groups in (1, 2, 4)] + [BERT, whisper] * 2
    for config in configs:
        config = {**config, "vocab_size": draw.choice((3, config["vocab_size"]))} if config in configs[:60] else config
        size = draw.randrange(2, 10)
        has_experts = config["architectures"][0] in random_models.MIXTURES and draw.random() < 0.5
        refused = check(config, Division(size, size if has_experts else 1))
        built = build_all(config, size, has_experts=has_experts)
        assert (refused is None) == (built is None), (config, size, refused, built)
        found.append(refused)
    texts = " ".join(filter(None, found))
    assert 10 < found.count(None) < len(found) - 10
    for noun in ("attention heads", "tokens of the vocabulary", "experts cannot", "o_groups"):
        assert noun in texts


@pytest.mark.parametrize(("config", "options", "text"), [
    (LLAMA, {"tensor_parallel_size": 64}, r"6 attention heads \(3 KV heads\) cannot be divided among 64 ranks"),
    (LLAMA, {"pipeline_parallel_size": 3}, "2 layers cannot be divided among 3 stages"),
    (LLAMA, {"pipeline_parallel_size": 2, "pipeline_layers": "1,2"}, "add up to 2, such as 1,1; got '1,2'"),
    (LLAMA, {"tensor_parallel_size": 2, **EXPERTS}, "this model has none; leave it out"),
    (MIXTURE, {"tensor_parallel_size": 2, "data_parallel_size": 2, **EXPERTS}, "3 experts cannot be divided among 4"),
    (MIXTURE, {"tensor_parallel_size": 2, **EXPERTS, "enable_eplb": True}, "2 ranks cannot have 3 experts"),
    ({**LLAMA, "intermediate_size": 3}, {"tensor_parallel_size": 4}, "3 intermediate dims cannot be divided among 4"),
])
def test_no_rank_is_started_in_vain(
    config: dict[str, Any], options: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    stated = engine_config(model=str(tmp_path), load_format="dummy", device="cpu", **options)
    monkeypatch.setattr(starting, "Workers", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=text):
        starting.build_ranked_engine(stated, lambda *_: None)


def test_what_can_be_divided_is_not_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    for options in (
        {"tensor_parallel_size": 6}, {"tensor_parallel_size": 3, "pipeline_parallel_size": 2, **EXPERTS},
        {"data_parallel_size": 2, **EXPERTS, "enable_eplb": True, "eplb_config": '{"num_redundant_experts": 1}'},
    ):
        check_layout(engine_config(model=str(tmp_path), load_format="dummy", **options))
