"""`read_facts`: what other processes are told of a loaded model."""

from __future__ import annotations

import msgspec

from headrace.base.cache import CacheLayout
from headrace.base.config import ModelConfig
from headrace.base.errors import ConfigError
from headrace.base.media_facts import MediaFacts
from headrace.base.messages import FamilyParsers, ModelFacts
from headrace.execution.loading import LoadedModel
from headrace.memory.plan import base_group
from headrace.models.generation import read_sampling_defaults
from headrace.models.source import ModelSource


def read_facts(loaded: LoadedModel, layout: CacheLayout, device: str, config: ModelConfig) -> ModelFacts:
    """Facts of a loaded model under a layout."""
    sampling = read_sampling_defaults(loaded.source, config)
    tokens = (base_group(layout.groups).num_pages - 1) * layout.page_size if layout.groups else 0
    return ModelFacts(
        model=loaded.source.name, architecture=loaded.source.architecture, family=loaded.family.name,
        dtype=str(loaded.dtype).removeprefix("torch."), device=device, max_model_len=layout.max_model_len,
        vocab_size=loaded.vocab_size, eos_ids=read_eos_ids(loaded.source, loaded.vocab_size),
        num_parameters=loaded.count_all_parameters(), page_size=layout.page_size, num_kv_tokens=tokens,
        default_sampling={name: default.value for name, default in sampling.items()},
        sampling_sources={name: default.source for name, default in sampling.items()},
        parsers=FamilyParsers(loaded.family.tool_parser, loaded.family.reasoning_parser),
        pooling=loaded.pooling.facts(loaded.spec.hidden_size) if loaded.pooling else None,
        media=_read_media(loaded),
    )


def _read_media(loaded: LoadedModel) -> MediaFacts | None:
    media = loaded.family.media
    # what an older config.json says of decoding is in generation_config.json today
    stated = {name: value for name, value in loaded.source.config.items() if value is not None}
    facts = None if media is None else media.facts({**loaded.source.generation_config, **stated})
    if facts is None or loaded.model.media is None:
        return facts
    return msgspec.structs.replace(
        facts, element_bytes=loaded.dtype.itemsize, num_pieces=loaded.model.media.num_pieces
    )


def read_eos_ids(source: ModelSource, vocab_size: int) -> list[int]:
    """End-of-text ids of generation_config.json and config.json, each once."""
    found: list[int] = []
    for config in (source.generation_config, source.config, source.config.get("text_config") or {}):
        stated = config.get("eos_token_id")
        found.extend(stated if isinstance(stated, list) else [] if stated is None else [stated])
    if any(type(token) is not int for token in found):
        raise ConfigError(f"eos_token_id must be a token id or a list of them, got {found}", param="eos_token_id")
    return [token for token in dict.fromkeys(found) if 0 <= token < vocab_size]
