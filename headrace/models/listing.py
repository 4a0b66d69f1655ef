"""Lists the models that can be served without a download: installed packages, folders, the Hugging Face cache.

Reads configurations and GGUF metadata, never weights. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.base.config import ModelConfig
from headrace.base.errors import HeadraceError, ModelError
from headrace.models.catalog import find_family, find_gguf_family
from headrace.models.finding import open_path
from headrace.models.hub import cached_files, cached_names, cached_revisions
from headrace.models.hub_files import group_ggufs
from headrace.models.packages import base_of_parts, find_package, find_parts, installed_names
from headrace.models.source import read_json
from headrace.models.weights.gguf_file import read_gguf_metadata

MAX_DEPTH = 3
MAX_FOLDERS = 5_000
"""Folders looked into: the command may be run in a home folder, or at the root."""
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages", "proc", "sys", "dev"}


@dataclass(frozen=True)
class ListedModel:
    """A model on this machine. ``name`` is what to give to ``serve``, perhaps with ``--revision``; ``place`` is
    ``package``, ``folder`` or ``hub``. ``num_bytes`` of its weight files. ``architecture`` as in its files, ``family``
    that of Headrace; ``quantization`` is the dtype of plain weights. ``max_len`` in tokens. ``problem``: why it cannot
    be served."""

    name: str
    place: str
    path: Path
    num_bytes: int = 0
    architecture: str = ""
    family: str = ""
    quantization: str = ""
    max_len: int | None = None
    problem: str = ""


def list_models(folders: Sequence[Path]) -> Iterator[ListedModel]:
    """The models in ``folders`` and below them, those of installed packages, and those of the hub cache."""
    seen: set[Path] = set()
    for folder in folders:
        for model in _in_folder(folder):
            if model.path.resolve() not in seen:
                seen.add(model.path.resolve())
                yield model
    yield from _packages()
    for name in sorted(cached_names()):
        yield from _in_cache(name)


def describe(name: str, place: str, path: Path) -> ListedModel:
    """The model at a folder or GGUF file."""
    model = ListedModel(name, place, path)
    try:
        found = open_path(path, "auto")
        num_bytes = sum(file.stat().st_size for file in found.weight_files)
        model = replace(model, path=found.path, num_bytes=num_bytes)
        return _read_gguf(model) if found.kind == "gguf" else _read_config(model)
    except HeadraceError as error:
        return replace(model, problem=error.message)
    except OSError as error:
        return replace(model, problem=f"cannot be read: {error.strerror or error}")


def _packages() -> Iterator[ListedModel]:
    usual = ModelConfig().model  # spelled as the documentation does; pip takes - and _ for the same
    bases = {base_of_parts(name) for name in installed_names()}
    for name in sorted(usual if base.replace("-", "_") == usual else base for base in bases):
        try:
            parts = find_parts(name)
            path = None if parts else find_package(name)
        except ModelError as error:
            # a package may have such files for other reasons than being a model
            if "holds no model" not in error.message:
                yield ListedModel(name, "package", Path(), problem=error.message)
            continue
        if parts:  # joined when they are served; the first has the metadata
            yield _read_or_explain(
                ListedModel(name, "package", parts[0], sum(part.stat().st_size for part in parts))
            )
        elif path is not None:
            yield describe(name, "package", path)


def _read_or_explain(model: ListedModel) -> ListedModel:
    try:
        return _read_gguf(model)
    except HeadraceError as error:
        return replace(model, problem=error.message)


def _in_folder(top: Path) -> Iterator[ListedModel]:
    if top.is_file():
        yield describe(_typed(top), "folder", top)
        return
    waiting, num_seen = [(top, 0)], 0
    while waiting and num_seen < MAX_FOLDERS:
        folder, depth = waiting.pop(0)
        num_seen += 1
        names = _names(folder)
        yield from _models_among(names, folder)
        if depth < MAX_DEPTH and not _is_model(names):
            below = (folder / name for name in names if not name.startswith(".") and name not in _SKIPPED)
            waiting += [(path, depth + 1) for path in below if path.is_dir() and not (path / "pyvenv.cfg").exists()]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # not ours to read
        return []


def _is_model(names: Iterable[str]) -> bool:
    """Whether a folder with these files is a model of the Hugging Face kind."""
    return "config.json" in names and any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _models_among(names: Sequence[str], folder: Path) -> Iterator[ListedModel]:
    if _is_model(names):
        yield describe(_typed(folder), "folder", folder)
    for first in sorted(group_ggufs(names)):
        yield describe(_typed(folder / first), "folder", folder / first)


def _typed(path: Path) -> str:
    """How a user would write the path here."""
    try:
        relative = path.resolve().relative_to(Path.cwd())
    except ValueError:
        return str(path.resolve())
    return f".{os.sep}{relative}" if relative.parts else "."


def _in_cache(repository: str) -> Iterator[ListedModel]:
    references = cached_revisions(repository)
    models = [
        model for revision, folder in references for model in _in_snapshot(repository, revision, folder)
    ]
    if not models or (all(model.problem for model in models) and "main" not in dict(references)):
        problem = f"not fetched completely; headrace pull {repository} goes on"
        models = [ListedModel(repository, "hub", Path(), problem=problem)]
    yield from models


def _in_snapshot(repository: str, revision: str, folder: Path) -> Iterator[ListedModel]:
    names = cached_files(folder)
    ggufs = sorted(group_ggufs(names))
    option = f" --revision {revision}" if revision != "main" else ""
    if _is_model(names) or not ggufs:
        yield describe(repository + option, "hub", folder)
    for first in ggufs:
        is_only = len(ggufs) == 1 and not _is_model(names)
        name = repository if is_only else f"{repository}/{first}" if "/" not in first else str(folder / first)
        yield describe(name + option, "hub", folder / first)


def _read_config(model: ListedModel) -> ListedModel:
    config = read_json(model.path / "config.json")
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    model = replace(
        model, architecture=architecture, quantization=_stored_form({**text, **config}),
        max_len=_whole({**text, **config}.get("max_position_embeddings"))
    )
    if not architecture:
        return replace(model, problem=f"{model.path / 'config.json'} names no architecture")
    return replace(model, family=find_family(architecture).name)


def _stored_form(config: dict[str, Any]) -> str:
    stated = config.get("quantization_config")
    if isinstance(stated, dict):
        bits = stated.get("bits")
        return " ".join([str(stated.get("quant_method", "quantized")), *([f"{bits} bits"] if bits else [])])
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _read_gguf(model: ListedModel) -> ListedModel:
    metadata = read_gguf_metadata(model.path)
    architecture = str(metadata.get("general.architecture", ""))
    model = replace(
        model, architecture=architecture, quantization=_file_type(metadata.get("general.file_type")),
        max_len=_whole(metadata.get(f"{architecture}.context_length"))
    )
    return replace(model, family=find_gguf_family(architecture).name)


def _file_type(number: Any) -> str:
    from gguf import LlamaFileType

    try:
        return str(LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:  # absent, or newer than the library
        return "GGUF"


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
