"""Finds an adapter's files by the path or name that was given, locally or on the hub; does not read them. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headrace.base.errors import ModelError, NotFound, RequestError
from headrace.models.hub import find_in_hub
from headrace.models.hub_files import HUB_NAME

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
FILES = (CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE)
HUB = "hub"
"""Stands among the folders of dynamic loads for names on the Hugging Face hub."""


def find_adapter(typed: str) -> Path:
    """The folder or GGUF file of an adapter: a path, else a name on the Hugging Face hub, which is downloaded if it is
    not in the cache. Raises `ModelError`."""
    if "\0" in typed:
        raise ModelError("the path of an adapter must not hold zero bytes")
    path = Path(os.path.expanduser(typed))
    if path.name == CONFIG_FILE and path.is_file():
        path = path.parent
    if path.exists():
        return path
    if not is_hub_name(typed):
        raise ModelError(f"there is no adapter at {path.absolute()}: give a folder with {CONFIG_FILE}, or a .gguf file")
    return _find_in_hub(typed)


def _find_in_hub(typed: str) -> Path:
    return find_in_hub(typed, None, wants_weights=True, can_open=is_complete, near=lambda: "")


def is_complete(path: Path) -> bool:
    """Whether a folder has the files of an adapter, or is a GGUF file."""
    return path.suffix == ".gguf" or all((path / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def is_hub_name(typed: str) -> bool:
    """Whether a name may be one on the hub: ``owner/name``."""
    return "/" in typed and not set(typed.split("/")) & {".", ".."} and HUB_NAME.fullmatch(typed) is not None


def find_allowed(typed: str, folders: Sequence[str]) -> str:
    """The resolved path of an adapter in one of the folders, or of one on the hub if `HUB` is among them. Neither
    ``..`` nor links lead outside. Raises `RequestError` for another place, `NotFound` where nothing is there; errors
    reveal nothing about other places."""
    if not folders:
        raise RequestError(
            "adapters cannot be loaded while the server runs: it was started without --lora-folders", param="lora_path"
        )
    if not typed or "\0" in typed:
        raise RequestError("lora_path must be the path of an adapter", param="lora_path")
    roots = [os.path.realpath(os.path.expanduser(folder)) for folder in folders if folder != HUB]
    for root in roots:
        wanted = os.path.realpath(os.path.join(root, typed))
        if not _is_inside(wanted, [root]):
            continue
        if os.path.exists(wanted):
            _check_files(Path(wanted), roots)
            return wanted
    if HUB in folders and is_hub_name(typed):
        try:
            return str(_find_in_hub(typed))  # not a path: this process may stand outside the folders
        except ModelError as error:
            raise NotFound(f"no adapter {typed!r}: {error.message}", param="lora_path") from error
    places = [os.path.realpath(os.path.join(root, typed)) for root in roots]
    if not any(_is_inside(place, roots) for place in places):
        raise RequestError("lora_path must be inside a folder of --lora-folders", param="lora_path")
    raise NotFound(f"no adapter at {typed!r} in the folders of --lora-folders", param="lora_path")


def _check_files(path: Path, roots: Sequence[str]) -> None:
    files = [path / name for name in FILES] if path.is_dir() else []
    outside = [file.name for file in files if not _is_inside(os.path.realpath(file), roots)]
    if outside:
        raise RequestError(f"{outside[0]} of the adapter is a link to a file outside --lora-folders", param="lora_path")


def _is_inside(path: str, roots: Sequence[str]) -> bool:
    return any(os.path.commonpath([root, path]) == root for root in roots)
