"""`ModelSource`: a model's configuration and the paths of its files, resolved from the user's path or name. Torch-free:
HTTP processes use it.

Tried in order: a path, an installed model package, a Hugging Face name. Weights are not opened here.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.base.config import ModelConfig
from headrace.base.errors import ConfigError, ModelError
from headrace.models.catalog import find_gguf_family
from headrace.models.config_fields import Fields, explain_errors
from headrace.models.finding import Found, find_model
from headrace.models.weights.gguf_file import CONSTANT_TENSORS, GgufTensor, read_floats, read_gguf_header

MAX_JSON_BYTES = 64 << 20
STATED_ASIDE = {
    "hf_quant_config.json": "modelopt", "quanto_qmap.json": "quanto", "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files in which writers state a quantization that config.json does not, and their ``quant_method``."""
HEAD_BYTES, NUM_SAMPLES, SAMPLE_BYTES = 1 << 20, 1024, 1 << 12
"""Of a weight file, for `digest_model`: with a sample every few megabytes, no layer that differs is passed over."""


@dataclass(frozen=True)
class ModelSource:
    """A resolved model. ``kind`` is ``folder`` (config.json and perhaps safetensors) or ``gguf`` (one file, or the
    first of a split one). ``config`` is the config.json dict (made from metadata for GGUF), ``generation_config`` that
    of generation_config.json or {}. ``architecture`` is ``config["architectures"][0]``. ``name`` is the
    model's: as typed, or that of the folder or file. ``weight_files`` is empty when there are none and random
    weights were asked for. ``gguf_metadata`` also has the file's constant tensors, as lists of numbers under their
    names; ``gguf_tensors`` are the positions of all tensors in the files."""

    name: str
    kind: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    weight_files: tuple[Path, ...] = ()
    gguf_metadata: dict[str, Any] = field(default_factory=dict)
    gguf_tensors: tuple[GgufTensor, ...] = ()

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    @property
    def quantization(self) -> dict[str, Any]:
        """The ``quantization_config``, with ``quant_method`` in lower case; empty where there is none. Raises
        `ConfigError` for anything but an object."""
        stated = Fields(self.config).section("quantization_config")
        return {**stated, "quant_method": str(stated["quant_method"]).lower()} if stated.get("quant_method") else stated

    @property
    def folder(self) -> Path:
        """The folder of tokenizer, template and other files beside the weights."""
        return self.path if self.kind == "folder" else self.path.parent


def digest_model(source: ModelSource) -> str:
    """What tells two models apart, wherever their files lie: a digest of the configuration, and of each weight file the
    size, the beginning (with names and shapes of tensors) and samples up to the end, as fine-tuned models may share
    most tensors. Raises `OSError` for files that cannot be read."""
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True, default=str).encode())
    for path in source.weight_files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(struct.pack("<Q", size) + file.read(HEAD_BYTES))
            for number in range(1, NUM_SAMPLES + 1):
                file.seek(max(0, size - SAMPLE_BYTES) * number // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def resolve_source(config: ModelConfig) -> ModelSource:
    """Find and read everything about a model but its weights.

    Raises `ModelError` that says what was looked for and where, with near matches; `ConfigError` for
    ``config_overrides`` that are no JSON object or a ``load_format`` that the files do not have; `UnknownArchitecture`
    for a GGUF file that no family serves.
    """
    overrides = _parse_overrides(config.config_overrides)
    found = find_model(config.model, config.load_format, config.revision)
    source = _read_gguf(found) if found.kind == "gguf" else _read_folder(found)
    source = replace(source, config=merge_config(source.config, overrides))
    architectures = source.config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(
            f"the configuration of {source.name} ({source.path}) names no architectures; add them with "
            '--config-overrides \'{"architectures": ["..."]}\''
        )
    return source


def merge_config(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``config`` with ``overrides`` laid over it; objects are merged key by key, anything else is replaced."""
    merged = dict(config)
    for key, value in overrides.items():
        known = merged.get(key)
        merged[key] = merge_config(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _parse_overrides(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        overrides = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config_overrides is no JSON: {error}", param="config_overrides") from error
    if not isinstance(overrides, dict):
        raise ConfigError(f"config_overrides must be a JSON object, got {text[:80]}", param="config_overrides")
    return overrides


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `ModelError` when it is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _read_folder(found: Found) -> ModelSource:
    config = read_json(found.path / "config.json")
    _find_quantization(config, found.path)
    return ModelSource(found.name, "folder", found.path, config, _generation_config(found.path), found.weight_files)


def _find_quantization(config: dict[str, Any], folder: Path) -> None:
    """Set ``quantization_config`` where a writer put it elsewhere: in the text model's part, in an object of that name
    (older compressed-tensors), MLX, ``compression_config``, `STATED_ASIDE`."""
    text = config.get("text_config")
    stated = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if isinstance(stated, dict) and isinstance(own := stated.get("quantization_config"), dict):
        stated = {**stated, **own}
    if stated:
        config["quantization_config"] = stated
    if isinstance(stated, dict) and stated.get("quant_method"):
        return
    by_mlx = config.get("quantization")
    if isinstance(by_mlx, dict) and "group_size" in by_mlx:
        config["quantization_config"] = {**by_mlx, "quant_method": "mlx"}
    elif stated:
        return
    elif config.get("compression_config"):
        config["quantization_config"] = {"quant_method": "compressed-tensors", **config["compression_config"]}
    elif aside := next((name for name in STATED_ASIDE if (folder / name).is_file()), None):
        config["quantization_config"] = {"quant_method": STATED_ASIDE[aside], **read_json(folder / aside)}


def _read_gguf(found: Found) -> ModelSource:
    headers = [read_gguf_header(path) for path in found.weight_files]
    metadata = headers[0].metadata
    expected = metadata.get("split.tensors.count")
    tensors = [tensor for header in headers for tensor in header.tensors]
    if expected is not None and expected != len(tensors):
        raise ModelError(
            f"{found.path} and its {len(headers) - 1} further parts hold {len(tensors)} tensors, not {expected}; fetch "
            "them again"
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{found.path} has no general.architecture; it is no model")
    # constants such as rope_freqs are configuration, which HTTP processes read without torch
    metadata.update({tensor.name: read_floats(tensor) for tensor in tensors if tensor.name in CONSTANT_TENSORS})
    family = find_gguf_family(architecture)
    if family.gguf_config is None:
        raise ModelError(f"model family {family.name} does not read GGUF files; {found.path} needs a family that does")
    with explain_errors(f"the metadata of {found.path}"):
        config = family.gguf_config(metadata)
    if "tie_word_embeddings" not in config:  # GGUF has no such key: a tied file just has no output matrix
        config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in tensors)
    generation = _generation_config(found.path.parent)
    return ModelSource(found.name, "gguf", found.path, config, generation, found.weight_files, metadata, tuple(tensors))
