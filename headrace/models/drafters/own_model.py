"""A model of its own as a drafter: any served family with the target's tokenizer.

T tokens, D hidden size of the drafter, V vocabulary of the target, n rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import FeatureSpec, ForwardBatch
from headrace.layers.draft import DraftModel
from headrace.layers.model import ServedModel
from headrace.layers.narrowing import Narrowing
from headrace.models.catalog import find_family
from headrace.models.config_fields import explain_errors
from headrace.models.drafters.contract import DraftKind, DraftQuery
from headrace.models.source import ModelSource, read_json

logger = logging.getLogger(__name__)

GGUF_TOKENS = "tokenizer.ggml.tokens"

MOST_DIFFERING = 0.02
"""Share of tokens that may differ: fine-tuned models rename reserved ones. A wrong draft costs time, never a token."""


class OwnModel(DraftModel):
    """See `DraftModel`; reads no features. A token is computed at its own position, so positions are shifted."""

    position_shift = 1

    def __init__(
        self, model: ServedModel, cache_specs: list[CacheSpec | None], *, vocab_size: int, target_vocab: int
    ):
        super().__init__(FeatureSpec(), 0, cache_specs)
        self.model, self._vocab_size, self._target_vocab = model, vocab_size, target_vocab
        self.is_capturable = model.is_capturable

    @property
    def prunes_last_layer(self) -> bool:
        """See `DraftModel`."""
        return self.model.prunes_last_layer

    def notice_stored(self) -> None:
        """See `StorableModel`."""
        self.model.notice_stored()

    def wants(self, name: str) -> bool:
        """See `DraftModel`."""
        return self.model.wants(name)

    def find_narrowing(self) -> Narrowing | None:
        """See `DraftModel`."""
        return self.model.find_narrowing()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `DraftModel`."""
        self.model.load_weights(tensors)

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """See `DraftModel`."""
        self.model.bind_cache(pages, group_of_layer)

    def forward(self, batch: ForwardBatch, inputs: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`; ``inputs`` [T, 0] are not read."""
        if self._vocab_size < self._target_vocab:  # a token that it does not know must not index its embedding
            batch = replace(batch, token_ids=batch.token_ids.clamp(max=self._vocab_size - 1))
        return self.model(batch)

    def compute_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`. A vocabulary may be padded further than the target's: those ids stand for no token."""
        return self.model.compute_logits(hidden)[:, : self._target_vocab].argmax(-1)

    def recycle(self, hidden: torch.Tensor) -> torch.Tensor:
        """Nothing, [n, 0]."""
        return hidden[:, :0]


class OwnModelKind(DraftKind):
    """See `DraftKind`."""

    def fits(self, source: ModelSource) -> bool:
        """Any model may draft; `build_model` says what is wrong with one that cannot."""
        return True

    def build_model(self, query: DraftQuery) -> OwnModel:
        """Raises `ConfigError` for another tokenizer, or a model that generates no text."""
        family = find_family(query.source.architecture)
        with explain_errors(f"the configuration of {query.source.path}"):
            spec = family.read_config(query.source.config)
        model = family.build_model(spec, query.build)
        if model.vocabulary is None and not family.generates:
            raise ConfigError(
                f"{query.source.name} ({query.source.architecture}) generates no text and cannot draft it",
                param="speculative_config",
            )
        check_tokenizers(query, spec.vocab_size)
        drafter = OwnModel(
            model, family.cache_specs(spec, query.kv_dtype), vocab_size=spec.vocab_size,
            target_vocab=query.target.spec.vocab_size,
        )
        drafter.max_model_len = spec.max_model_len
        return drafter


def check_tokenizers(query: DraftQuery, vocab_size: int) -> None:
    """Raise `ConfigError` unless drafter and target have the same tokens, but for a few that were renamed, or padding
    at the end. Where one of them has no tokenizer that can be read here, vocabularies of one size pass for equal."""
    target, drafter = query.target, query.source
    ours, theirs = read_tokens(target.source, target.tokenizer), read_tokens(drafter)
    if ours is None or theirs is None:
        if vocab_size != target.spec.vocab_size:
            raise ConfigError(
                f"{drafter.name} has {vocab_size} tokens and {target.source.name} {target.spec.vocab_size}; a drafter "
                "needs the tokenizer of the served model", param="speculative_config",
            )
        return
    num_tokens = max(len(ours), len(theirs))
    differing = sorted(i for i, token in ours.items() if theirs.get(i, token) != token)
    num_different = len(differing) + num_tokens - len(ours.keys() & theirs.keys())
    if num_different <= MOST_DIFFERING * num_tokens:
        if differing:
            logger.warning("%d tokens of the drafter %s have other names", len(differing), drafter.name)
        return
    example = f", first {differing[0]}: {theirs[differing[0]]!r}, {ours[differing[0]]!r}" if differing else ""
    raise ConfigError(
        f"{drafter.name} has another tokenizer than {target.source.name}: {num_different} of {num_tokens} tokens differ"
        f"{example}; a drafter needs the tokenizer of the served model", param="speculative_config",
    )


def read_tokens(source: ModelSource, tokenizer: str | None = None) -> dict[int, str] | None:
    """Tokens by id, of tokenizer.json or of GGUF metadata; None if there are none that can be read. ``tokenizer``: a
    folder or file instead of the model's own."""
    path = source.folder if tokenizer is None else Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.name == "tokenizer.json" and path.is_file():
        return _read_tokenizer_json(path)
    tokens = source.gguf_metadata.get(GGUF_TOKENS) if tokenizer is None else None
    return None if tokens is None else dict(enumerate(map(str, tokens)))


def _read_tokenizer_json(path: Path) -> dict[int, str]:
    """Vocabularies are an object from token to id, or (Unigram) a list of pairs of token and score."""
    whole = read_json(path)
    with explain_errors(str(path)):
        vocab = whole["model"]["vocab"]
        named = {i: token for token, i in vocab.items()} if isinstance(vocab, dict) else {
            i: token for i, (token, _) in enumerate(vocab)
        }
        return named | {entry["id"]: entry["content"] for entry in whole.get("added_tokens") or ()}


OWN_MODEL = OwnModelKind()
