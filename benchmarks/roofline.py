"""The least time a decoder needs for a workload: bytes over bandwidth plus operations over the matrix rate.

Ideal continuous batching is assumed: every sequence decodes at once, weights are read once a step, each prompt is
computed once (a shared prefix once in all). What is measured above this floor is overhead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headrace.layers.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, MoeSpec
from headrace.models.catalog import find_family

BANDWIDTH = 4.3e12  # bytes/s, device-to-device copy measured on an H200
MATRIX_RATE = 790e12  # FLOP/s, bf16 8192^3 product measured on an H200
FP8_RATE = 1400e12  # the same of FP8


@dataclass(frozen=True)
class WeightCosts:
    """Bytes of a weight, its scales included, and FLOP/s of large products."""

    linear: float = 2
    expert: float = 2
    head: float = 2
    rate: float = MATRIX_RATE


BF16 = WeightCosts()


@dataclass(frozen=True)
class Shape:
    """What of a config.json counts; parameters without the embedding gather, a tied head is read once a step.

    ``cached_dims``: elements that a layer caches of a token. ``pair_dims``: products of a query and a key, and of a
    weight and a value, of all heads together. ``expert_parameters``: one expert in each layer that has some.
    ``windows``: how many layers see how many tokens (0: all).
    """

    cached_dims: int
    pair_dims: int
    windows: dict[int, int]
    matmul_parameters: int
    head_parameters: int
    expert_parameters: int = 0
    num_experts: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        spec = find_family(config["architectures"][0]).read_config(config)
        assert isinstance(spec, DecoderSpec), "knows plain decoders alone"
        width, plain, expert, routing = spec.hidden_size, 0, 0, None
        attention, cached_dims, pair_dims = _count_attention(spec.attention, width)
        for layer in spec.layers:
            mlp = layer.mlp or spec.mlp
            plain += attention
            if isinstance(mlp, MoeSpec):
                routing = mlp.routing
                plain += width * routing.num_experts + (3 * width * mlp.shared.intermediate_size if mlp.shared else 0)
                expert += 3 * width * mlp.expert.intermediate_size
            else:
                plain += 3 * width * mlp.intermediate_size
        chosen = (expert, routing.num_experts, routing.top_k) if routing else ()
        windows = Counter(layer.window for layer in spec.layers)
        return cls(cached_dims, pair_dims, dict(windows), plain, width * spec.vocab_size, *chosen)

    @property
    def used_parameters(self) -> int:
        """What each token is multiplied by."""
        return self.matmul_parameters + self.top_k * self.expert_parameters

    def read_weight_bytes(self, tokens: int, costs: WeightCosts) -> float:
        """Bytes of weights that a decode step of so many tokens reads, if they choose their experts independently and
        evenly."""
        missed = (1 - self.top_k / self.num_experts) ** tokens if self.num_experts else 1
        plain = costs.linear * self.matmul_parameters + costs.head * self.head_parameters
        return plain + costs.expert * self.num_experts * (1 - missed) * self.expert_parameters

    def read_kv_bytes(self, lens: list[int]) -> float:
        """Bytes of the cache that a decode step of requests of such lengths reads, in bf16."""
        seen = sum(
            layers * sum(min(n, window) if window else n for n in lens) for window, layers in self.windows.items()
        )
        return 2 * self.cached_dims * seen

    def count_pairs(self, start: int, end: int) -> float:
        """Pairs of a query from ``start`` to ``end`` and a key that it sees, in all layers."""

        def count(n: int, window: int) -> float:
            return n**2 / 2 if not window or n <= window else window**2 / 2 + (n - window) * window

        return sum(layers * (count(end, window) - count(start, window)) for window, layers in self.windows.items())


def _count_attention(attention: AttentionSpec | LatentAttentionSpec, width: int) -> tuple[int, int, int]:
    """(parameters, ``cached_dims``, ``pair_dims``) of a layer."""
    if isinstance(attention, LatentAttentionSpec):
        heads, latent = attention.num_heads, attention.kv_lora_rank + attention.qk_rope_head_dim
        query, value = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim
        up = attention.kv_lora_rank * heads * (attention.qk_nope_head_dim + value)
        inner = attention.q_lora_rank
        q = inner * (width + heads * query) if inner else width * heads * query
        return q + width * latent + up + heads * value * width, latent, heads * (query + value)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    return width * attention.head_dim * 2 * (heads + kv_heads), 2 * kv_heads * attention.head_dim, (
        2 * heads * attention.head_dim
    )


@dataclass(frozen=True)
class Floor:
    """Least bytes moved by decode steps, least operations of prefill at a rate of so many a second, and the seconds
    they take."""

    decode_bytes: float
    prefill_flops: float
    rate: float

    @property
    def seconds(self) -> float:
        return self.decode_bytes / BANDWIDTH + self.prefill_flops / self.rate


def floor_of(shape: Shape, prompts: list[list[int]], output_lens: list[int], costs: WeightCosts) -> Floor:
    """The floor of a workload with weights of such costs and a cache in bf16."""
    shared = _shared_prefix_len(prompts)
    flops = 0.0
    for i, prompt in enumerate(prompts):
        start = shared if i else 0
        flops += 2 * shape.used_parameters * (len(prompt) - start) + 2 * shape.head_parameters
        flops += 2 * shape.pair_dims * shape.count_pairs(start, len(prompt))
    moved = 0.0
    for step in range(1, max(output_lens)):
        lens = [len(p) + step for p, n in zip(prompts, output_lens, strict=True) if n > step]
        moved += shape.read_weight_bytes(len(lens), costs) + shape.read_kv_bytes(lens)
    return Floor(moved, flops, costs.rate)


def _shared_prefix_len(prompts: list[list[int]]) -> int:
    if len(prompts) < 2:
        return 0
    length = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length
