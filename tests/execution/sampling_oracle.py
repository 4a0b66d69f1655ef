"""All logit processors and sampling once more, in numpy float64, one row at a time, written from the definitions."""

from __future__ import annotations

import math

import numpy as np

from headrace.base.sampling import SamplingSpec

MASK64 = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    def mix(x: int) -> int:
        x &= MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    return (mix(mix(seed + golden) + (position + 1) * golden) >> 11) / 2**53


def edited_logits(logits: np.ndarray, spec: SamplingSpec, prompt: list[int], output: list[int]) -> np.ndarray:
    x = logits.astype(np.float64).copy()
    if spec.rules:
        rules = spec.rules
        for token, bias in rules.bias.items():
            x[token] += bias
        if rules.allowed_ids:
            x[[t for t in range(len(x)) if t not in rules.allowed_ids]] = -math.inf
        context = prompt + output
        for word in rules.bad_words:
            if len(word) == 1 or context[-(len(word) - 1):] == word[:-1]:
                x[word[-1]] = -math.inf
        if len(output) < rules.min_tokens:
            x[rules.held_ids] = -math.inf
    if spec.penalties:
        for token in set(prompt + output):
            x[token] = x[token] / spec.penalties.repetition if x[token] > 0 else x[token] * spec.penalties.repetition
        for token in set(output):
            x[token] -= spec.penalties.frequency * output.count(token) + spec.penalties.presence
    return x


def kept_probabilities(x: np.ndarray, spec: SamplingSpec) -> np.ndarray:
    x = x / spec.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < spec.min_p * p.max()] = 0.0
    if spec.top_k > 0:
        p[p < np.sort(p)[::-1][min(spec.top_k, len(p)) - 1]] = 0.0
    if spec.top_p < 1.0:
        ranked = np.sort(p)[::-1][: spec.top_k if spec.top_k > 0 else len(p)]
        reached = np.cumsum(ranked) / ranked.sum()
        p[p < ranked[int(np.searchsorted(reached, spec.top_p))]] = 0.0
    return p / p.sum()


def sample(probabilities: np.ndarray, seed: int, position: int) -> int:
    return int(np.searchsorted(np.cumsum(probabilities), uniform(seed, position), side="right"))
