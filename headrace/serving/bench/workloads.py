"""Four fixed offline workloads. Each function maps ``(vocab_size, seed)`` to prompts (token ids) and output lengths.

The order of the draws is part of the definition: figures taken elsewhere with the same workloads stay comparable.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Workload = tuple[list[list[int]], list[int]]

MARGIN = 1000
"""Ids this near to either end of the vocabulary are not drawn: special tokens live there."""


def _draw_ids(random: Random, vocab_size: int, count: int) -> list[int]:
    return [random.randrange(MARGIN, vocab_size - MARGIN) for _ in range(count)]


def draw_latency1(vocab_size: int, seed: int = 1) -> Workload:
    """One stream, 512 tokens in and 256 out: launch overhead and the bandwidth of the weights."""
    return [_draw_ids(Random(seed), vocab_size, 512)], [256]


def draw_offline256(vocab_size: int, seed: int = 0) -> Workload:
    """256 requests, 100 to 1024 tokens in and out: continuous batching and the bandwidth of attention."""
    random = Random(seed)
    prompt_lens, output_lens = ([random.randint(100, 1024) for _ in range(256)] for _ in range(2))
    return [_draw_ids(random, vocab_size, length) for length in prompt_lens], output_lens


def draw_prefill16x8k(vocab_size: int, seed: int = 2) -> Workload:
    """16 prompts of 8192 tokens, one token out: arithmetic."""
    random = Random(seed)
    return [_draw_ids(random, vocab_size, 8192) for _ in range(16)], [1] * 16


def draw_sharedprefix(vocab_size: int, seed: int = 3) -> Workload:
    """512 prompts of 2112 tokens, the first 2048 alike, 16 out: the prefix cache."""
    random = Random(seed)
    prefix = _draw_ids(random, vocab_size, 2048)
    return [prefix + _draw_ids(random, vocab_size, 64) for _ in range(512)], [16] * 512


ALL: dict[str, Callable[..., Workload]] = {
    "latency1": draw_latency1, "offline256": draw_offline256, "prefill16x8k": draw_prefill16x8k,
    "sharedprefix": draw_sharedprefix,
}
