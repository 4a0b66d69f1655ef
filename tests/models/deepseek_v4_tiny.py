"""A tiny random DeepSeek-V4: transformers' as the oracle, ours over its own pools and backends without an engine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from harness import CPU, Harness, Sequence

from headrace.base.cache import CacheLayout, group_layers
from headrace.base.config import CacheConfig
from headrace.execution.assembly import choose_backends
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch, GroupStep
from headrace.layers.build import Build
from headrace.memory.hot_pool import build_pools
from headrace.models.catalog import find_family

VOCAB = 256
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "num_hash_layers": 1, "sliding_window": 16, "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32, "index_head_dim": 16, "index_topk": 8, "max_position_embeddings": 4096,
    "rope_parameters": YARN, "initializer_range": 0.1,
    "eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0,
}


def make_oracle(**options: Any) -> transformers.PreTrainedModel:
    """transformers' model with every parameter and buffer away from its neutral value."""
    torch.manual_seed(1)
    config = transformers.DeepseekV4Config(**{**TINY, **options})
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("tid2eid"):
                tensor.copy_(
                    torch.stack(
                        [
                            torch.randperm(config.n_routed_experts)[: config.num_experts_per_tok]
                            for _ in range(config.vocab_size)
                        ]
                    )
                )
            elif "inv_freq" not in name and (tensor.dim() == 1 or name.endswith(("position_bias", "base", "scale"))):
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model


def published_config(**options: Any) -> dict[str, Any]:
    """config.json as published files spell it."""
    config = {**TINY, "architectures": ["DeepseekV4ForCausalLM"], **options}
    return {
        "rope_scaling": {
            "type": "yarn", **{k: v for k, v in config.pop("rope_parameters").items() if k != "rope_type"}
        },
        **config
    }


@torch.no_grad()
def oracle_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, V], in one pass without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens."""
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class V4Harness(Harness):
    """See `Harness`; groups have backends, and pages start as NaN where their type has one."""

    backends: Any = None

    def _batch(self, spans: list[tuple[Sequence, list[int]]]) -> ForwardBatch:
        positions = [list(range(s.length, s.length + len(tokens))) for s, tokens in spans]
        steps = []
        for group, backend in enumerate(self.backends):
            inputs = self._inputs(group, spans, positions)
            backend.prepare(inputs)
            steps.append(GroupStep(inputs, backend))
        token_ids = torch.tensor([t for _, tokens in spans for t in tokens], device=self.device)
        return ForwardBatch(token_ids, torch.tensor([p for ps in positions for p in ps], device=self.device), steps)


def build_harness(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], *, page_size: int = 128, max_len: int = 768,
    num_sequences: int = 4,
    kv_dtype: str = "float32", dtype: torch.dtype = torch.float32, device: torch.device = CPU,
    moe_experts: str = "auto", hot_slots: int = 0,
) -> V4Harness:
    """Build the model, load ``tensors`` in shuffled order, and give it pools of shuffled pages."""
    family = find_family("DeepseekV4ForCausalLM")
    spec = family.read_config(config)
    if hot_slots:
        family = family.hosting(spec, hot_slots)
    build = Build(device, dtype, max_len, moe_experts)
    model = family.build_model(spec, build)
    pairs = list(tensors.items())
    random.Random(0).shuffle(pairs)
    model.load_weights(pairs)
    places = family.cache_specs(spec, kv_dtype)
    num_pages = 1 + num_sequences * -(-max_len // page_size)
    groups = [type(g)(g.spec, g.layers, num_pages) for g in group_layers(places)]
    pools = build_pools(CacheLayout(page_size, num_sequences, max_len, groups), device)
    pages, owners = [None] * len(places), [None] * len(places)
    for g, (group, pool) in enumerate(zip(groups, pools, strict=True)):
        for place in group.layers:
            pages[place], owners[place] = KvPages(*pool.layer(place), hot=pool.hot(place)), g
            for tensor in pool.layer(place):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    model.bind_cache(pages, owners)
    chosen = choose_backends((model,), groups, build, CacheConfig(page_size=page_size), "auto")
    free = [random.Random(seed).sample(range(1, num_pages), num_pages - 1) for seed in range(len(groups))]
    return V4Harness(model, groups, [], page_size, max_len, free, device, backends=chosen.backends)
