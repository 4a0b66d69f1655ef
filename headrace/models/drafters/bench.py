"""For benchmarks: an EAGLE-3 head of the usual size with random weights, which costs what a trained one costs.

Refuses: saying how often its drafts are right; the runner does."""

from __future__ import annotations

from dataclasses import replace

from headrace.layers.draft import DraftModel
from headrace.models.drafters.contract import DraftKind, DraftQuery, DraftTarget
from headrace.models.drafters.eagle3 import EAGLE3
from headrace.models.source import ModelSource

MOST_TOKENS = 32_000
"""Vocabulary of published heads."""
NOT_OF_A_HEAD = ("quantization_config", "num_experts", "layer_types", "sliding_window")


class BenchHead(DraftKind):
    """See `DraftKind`."""

    has_checkpoint = False
    is_random = True

    def build_model(self, query: DraftQuery) -> DraftModel:
        """Raises `ConfigError` for a target that gives no hidden states."""
        return EAGLE3.build_model(replace(query, source=describe_head(query.target)))


def describe_head(target: DraftTarget) -> ModelSource:
    """A source whose configuration is that of a head for the target: one layer of its dimensions."""
    stated, count = target.source.config, target.num_layers
    config = {name: value for name, value in stated.items() if name not in NOT_OF_A_HEAD}
    config |= {
        "num_hidden_layers": 1, "draft_vocab_size": min(MOST_TOKENS, target.spec.vocab_size),
        "eagle_aux_hidden_state_layer_ids": [min(2, count), count // 2, max(0, count - 3)],
    }
    return ModelSource("bench", "folder", target.source.path, config)


BENCH_HEAD = BenchHead()
