"""DeepSeek-V4's multi-token prediction module against transformers: its layer is one more layer of transformers' model,
whose input is replaced by what the module reads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_tiny import V4Harness, build_harness, make_oracle, oracle_logits, prompt, published_config
from harness import CPU
from test_deepseek_v4 import publish

from headrace.base.cache import group_layers
from headrace.base.config import CacheConfig
from headrace.base.errors import ConfigError
from headrace.execution.assembly import choose_backends
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import Features
from headrace.layers.build import Build
from headrace.memory.pools import build_pool
from headrace.models.catalog import find_family
from headrace.models.deepseek_v4.prediction import V4Prediction
from headrace.models.drafters.contract import DraftQuery, DraftTarget
from headrace.models.source import ModelSource

NUM_LAYERS, STREAMS, WIDTH = 3, 4, 64
RATIOS = [0, 4, 128]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def draw_module() -> dict[str, torch.Tensor]:
    """What the module has besides a layer."""
    generator = torch.Generator().manual_seed(9)
    shapes = {"enorm": (WIDTH,), "hnorm": (WIDTH,), "e_proj": (WIDTH, WIDTH), "h_proj": (WIDTH, WIDTH)}
    return {f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def predict_exactly(oracle: Any, module: dict[str, torch.Tensor], text: list[int]) -> torch.Tensor:
    """Logits [T - 1, V] of the tokens after the next, from transformers' layers."""
    following = oracle.model.embed_tokens(torch.tensor([text[1:]]))
    read = rms_norm(following, module["enorm.weight"]) @ module["e_proj.weight"].T

    def replace(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        streams = arguments[0]  # [1, T - 1, S, D]
        assert streams.shape[2:] == (STREAMS, WIDTH)
        own = rms_norm(streams, module["hnorm.weight"]) @ module["h_proj.weight"].T
        return (own + read.unsqueeze(2), *arguments[1:]), keywords

    handle = oracle.model.layers[NUM_LAYERS].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        # the layers below see the tokens themselves
        return oracle_logits(oracle, text[:-1])
    finally:
        handle.remove()


def build_drafter(target: V4Harness, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> V4Harness:
    """The module over pages of its own."""
    family = find_family("DeepseekV4ForCausalLM")
    source = ModelSource("tiny", "folder", Path(), config)
    whole = DraftTarget(source, family, target.model.spec, target.model)
    build = Build(CPU, torch.float32, target.max_len)
    drafter = V4Prediction(target.model.spec, DraftQuery(source, None, whole, build, "float32"))
    drafter.load_weights(list(tensors.items()))
    whole.check_features("mtp", drafter.features)
    num_pages = 9
    groups = [type(g)(g.spec, g.layers, num_pages) for g in group_layers(drafter.cache_specs)]
    pool = build_pool(groups[0], target.page_size, CPU)
    drafter.bind_cache([KvPages(*pool.layer(0))], [0])
    chosen = choose_backends((drafter,), groups, build, CacheConfig(page_size=target.page_size), "auto")
    free = [random.Random(0).sample(range(1, num_pages), num_pages - 1)]
    return V4Harness(drafter, groups, [], target.page_size, target.max_len, free, CPU, backends=chosen.backends)


@torch.inference_mode()
def test_it_is_one_more_layer_over_streams_and_the_next_token():
    """In chunks that end within windows."""
    oracle = make_oracle(num_hidden_layers=NUM_LAYERS + 1, compress_ratios=[*RATIOS, 0])
    text, module = prompt(8, 41), draw_module()
    expected = predict_exactly(oracle, module, text)
    config = published_config(num_hidden_layers=NUM_LAYERS, compress_ratios=RATIOS, num_nextn_predict_layers=1)
    layer = f"layers.{NUM_LAYERS}."
    published = publish(oracle.state_dict())
    target = build_harness(
        config, {name: tensor for name, tensor in published.items() if not name.startswith(layer)}, max_len=128
    )
    own = {name.replace(layer, "mtp.0."): tensor for name, tensor in published.items() if name.startswith(layer)}
    own |= {f"mtp.0.{name}": published[name] for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")}
    own |= {f"mtp.0.{name}": tensor for name, tensor in module.items()}
    drafter = build_drafter(target, config, own)
    first, second, logits = target.start(), drafter.start(), []
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        batch = target._batch([(first, text[start:stop])])
        batch.features = Features(drafter.model.features, lambda *_: None)
        target.model.forward(batch)
        following = drafter._batch([(second, text[start + 1 : stop + 1])])
        hidden = drafter.model.forward(following, batch.features.values)
        logits.append(drafter.model.compute_logits(hidden))
        first.length, second.length = stop, stop
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)
    ids = drafter.model.compute_ids(drafter.model.recycle(hidden))
    assert torch.equal(ids, logits[-1].argmax(-1))


def test_drafters_of_another_kind_are_named():
    with pytest.raises(ConfigError, match="dspark_block_size"):
        config = published_config(num_nextn_predict_layers=1, dspark_block_size=5)
        build_drafter(build_harness(config, make_oracle().state_dict()), config, {})
