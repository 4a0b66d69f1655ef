"""Default sampling parameters of a model: which fields may have one, and the user's own over the model's.

Refuses: files. ``models/generation.py`` reads what a model states.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, RequestError
from headrace.base.option import read_object, suggest
from headrace.base.sampling import SamplingParams

DEFAULT_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)
"""Fields of `SamplingParams` for which a model or the user may set the default of requests."""
OVERRIDE = "override_generation_config"


class SamplingDefault(msgspec.Struct, frozen=True, array_like=True):
    """The default of one field, and where it came from: a file, a key of it, or an option."""

    value: int | float
    source: str


def read_default(name: str, value: Any) -> int | float:
    """``value`` as `SamplingParams` takes it for field ``name``; raises `RequestError` if requests may not have it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if name == "top_k" and value != int(value):
        raise RequestError(f"top_k must be a whole number, got {value!r}", param=name)
    number = int(value) if name == "top_k" else float(value)
    msgspec.structs.replace(SamplingParams(), **{name: number}).validate()
    return number


def parse_generation_override(text: str | None) -> dict[str, int | float]:
    """The fields of ``--override-generation-config``; raises `ConfigError` naming what is wrong and what is known."""
    if not text:
        return {}
    stated = read_object(text, OVERRIDE, example='{"temperature": 0.2}')
    for name in stated:
        if name not in DEFAULT_FIELDS:
            hint = suggest(name, DEFAULT_FIELDS, otherwise=f"; known: {', '.join(DEFAULT_FIELDS)}")
            raise ConfigError(f"{OVERRIDE} has no field {name[:80]!r}{hint}", param=OVERRIDE)
    try:
        return {name: read_default(name, value) for name, value in stated.items()}
    except RequestError as error:
        raise ConfigError(f"{OVERRIDE}: {error}", param=OVERRIDE) from error
