"""The least time a dense decoder needs for a workload: bytes over bandwidth plus operations over the matrix rate.

Ideal continuous batching is assumed: every sequence decodes at once, weights are read once a step, each prompt is
computed once (a shared prefix once in all). What is measured above this floor is overhead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BANDWIDTH = 4.3e12  # bytes/s, device-to-device copy measured on an H200
MATRIX_RATE = 790e12  # FLOP/s, bf16 8192^3 product measured on an H200


@dataclass(frozen=True)
class Shape:
    """What of a config.json counts. ``weight_bytes`` excludes the embedding gather; a tied head is read once a step."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    matmul_parameters: int
    head_parameters: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads, dim = config.get("num_key_value_heads", heads), config.get("head_dim") or width // heads
        layer = width * dim * (2 * heads + 2 * kv_heads) + 3 * width * config["intermediate_size"]
        return cls(config["num_hidden_layers"], heads, kv_heads, dim, layer * config["num_hidden_layers"], width * config["vocab_size"])

    @property
    def kv_bytes_per_token(self) -> int:
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Floor:
    """Least bytes moved by decode steps, least operations of prefill, and the seconds they take."""

    decode_bytes: float
    prefill_flops: float

    @property
    def seconds(self) -> float:
        return self.decode_bytes / BANDWIDTH + self.prefill_flops / MATRIX_RATE


def floor_of(shape: Shape, prompts: list[list[int]], output_lens: list[int]) -> Floor:
    """The floor of a workload in bf16."""
    shared = _shared_prefix_len(prompts)
    flops = 0.0
    for i, prompt in enumerate(prompts):
        start = shared if i else 0
        computed = len(prompt) - start
        pairs = (len(prompt) ** 2 - start**2) / 2
        flops += 2 * shape.matmul_parameters * computed + 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
        flops += 2 * shape.head_parameters
    moved = 0.0
    for step in range(1, max(output_lens)):
        lens = [len(p) + step for p, n in zip(prompts, output_lens, strict=True) if n > step]
        moved += 2 * (shape.matmul_parameters + shape.head_parameters) + shape.kv_bytes_per_token * sum(lens)
    return Floor(moved, flops)


def _shared_prefix_len(prompts: list[list[int]]) -> int:
    if len(prompts) < 2:
        return 0
    length = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length
