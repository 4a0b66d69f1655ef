"""The least time a decoder needs for a workload: bytes over bandwidth plus operations over the matrix rate.

Ideal continuous batching is assumed: every sequence decodes at once, weights are read once a step, each prompt is
computed once (a shared prefix once in all). What is measured above this floor is overhead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headrace.layers.spec import DecoderSpec, MoeSpec
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

    ``expert_parameters``: one expert in each layer that has some. ``windows``: how many layers see how many tokens (0:
    all).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
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
        heads, width, plain, expert, routing = spec.attention, spec.hidden_size, 0, 0, None
        for layer in spec.layers:
            mlp = layer.mlp or spec.mlp
            plain += width * heads.head_dim * 2 * (heads.num_heads + heads.num_kv_heads)
            if isinstance(mlp, MoeSpec):
                routing = mlp.routing
                plain += width * routing.num_experts + (3 * width * mlp.shared.intermediate_size if mlp.shared else 0)
                expert += 3 * width * mlp.expert.intermediate_size
            else:
                plain += 3 * width * mlp.intermediate_size
        chosen = (expert, routing.num_experts, routing.top_k) if routing else ()
        windows = Counter(layer.window for layer in spec.layers)
        return cls(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, dict(windows), plain, width * spec.vocab_size, *chosen
        )

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
        """Keys and values that a decode step of requests of such lengths reads, in bf16."""
        seen = sum(
            layers * sum(min(n, window) if window else n for n in lens) for window, layers in self.windows.items()
        )
        return 4 * self.num_kv_heads * self.head_dim * seen

    def count_pairs(self, start: int, end: int) -> float:
        """Pairs of a query from ``start`` to ``end`` and a key that it sees, in all layers."""

        def count(n: int, window: int) -> float:
            return n**2 / 2 if not window or n <= window else window**2 / 2 + (n - window) * window

        return sum(layers * (count(end, window) - count(start, window)) for window, layers in self.windows.items())


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
        flops += 4 * shape.num_heads * shape.head_dim * shape.count_pairs(start, len(prompt))
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
