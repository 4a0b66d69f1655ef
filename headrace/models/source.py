"""`ModelSource`: where a model's files are, found from what the user typed. Torch-free: the HTTP process reads it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelSource:
    """A resolved model. ``kind`` is ``folder`` (config.json and perhaps safetensors) or ``gguf`` (one file, or the
    first of a split one). ``config`` is the config.json dict (made from metadata for GGUF), ``generation_config`` that
    of generation_config.json or {}. ``architecture`` is ``config["architectures"][0]``."""

    name: str
    kind: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    weight_files: tuple[Path, ...] = ()
    gguf_metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]
