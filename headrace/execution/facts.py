"""What the edges may know of a model, read from the keys that all Hugging Face configurations share."""

from __future__ import annotations

import logging
import math
from typing import Any

from headrace.base.cache import CacheLayout
from headrace.base.errors import ConfigError, RequestError
from headrace.base.messages import ModelFacts
from headrace.base.sampling import SamplingParams
from headrace.execution.loading import LoadedModel
from headrace.memory.plan import base_group
from headrace.models.source import ModelSource

logger = logging.getLogger(__name__)

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_facts(loaded: LoadedModel, layout: CacheLayout, device: str) -> ModelFacts:
    """Facts of a loaded model under a layout."""
    tokens = (base_group(layout.groups).num_pages - 1) * layout.page_size if layout.groups else 0
    return ModelFacts(
        model=loaded.source.name, architecture=loaded.source.architecture, family=loaded.family.name,
        dtype=str(loaded.dtype).removeprefix("torch."), device=device, max_model_len=layout.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_ids=read_eos_ids(loaded.source, loaded.vocab_size), num_parameters=loaded.num_parameters,
        page_size=layout.page_size,
        num_kv_tokens=tokens, default_sampling=read_default_sampling(loaded.source.generation_config),
        tool_parser=loaded.family.tool_parser, reasoning_parser=loaded.family.reasoning_parser,
        pooling=loaded.pooling.facts(loaded.spec.hidden_size) if loaded.pooling else None,
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


def read_default_sampling(generation_config: dict[str, Any]) -> dict[str, int | float]:
    """The sampling values a model's makers recommend, under the names of `SamplingParams`. One that no request could
    ask for is left out: it would be refused as if users had sent it."""
    stated = {key: generation_config.get(key) for key in SAMPLING_KEYS}
    numbers = {
        key: value for key, value in stated.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return {
        key: int(value) if key == "top_k" else float(value) for key,
        value in numbers.items() if _can_be_asked_for(key, value)
    }


def _can_be_asked_for(key: str, value: float) -> bool:
    try:
        SamplingParams(**{key: int(value) if key == "top_k" and math.isfinite(value) else value}).validate()
    except RequestError as error:
        logger.warning("generation_config.json: %s; it is ignored", error)
        return False
    return True
