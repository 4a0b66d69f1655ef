"""`EncoderSpec`: all that tells one encoder of the BERT line from another, as plain numbers. Torch-free.

Refuses: names of families and of checkpoint tensors (``models/``), and tensors (``encoder.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.cache import CacheSpec
from headrace.layers.spec import MlpSpec


@dataclass(frozen=True)
class EncoderTables:
    """The embeddings that are added up for each token: words, positions (the first token has number
    ``first_position``), and which of ``num_kinds`` texts of a pair it belongs to."""

    vocab_size: int
    num_positions: int
    first_position: int
    num_kinds: int


@dataclass(frozen=True)
class EncoderSpec:
    """A transformer whose tokens see each other both ways, with a norm after each branch. ``mlp`` has no gate.
    ``num_classes`` is 0 without a classifier. ``norm_eps`` is that of the layer norms."""

    hidden_size: int
    num_heads: int
    num_layers: int
    mlp: MlpSpec
    norm_eps: float
    tables: EncoderTables
    num_classes: int = 0

    @property
    def vocab_size(self) -> int:
        return self.tables.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens that have a position."""
        return self.tables.num_positions - self.tables.first_position


def encoder_cache_specs(spec: EncoderSpec, kv_dtype: str) -> list[CacheSpec | None]:
    """No layer keeps anything: a text is computed whole, in one step."""
    return [None] * spec.num_layers
