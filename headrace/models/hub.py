"""Models on the Hugging Face hub: the local cache first, then, when online, a download. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.base import env
from headrace.base.errors import ModelError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(/[\w.-]+\.gguf)?")
"""``owner/name`` or ``name``; ``owner/name/FILE.gguf`` names one file of a repository with several."""

T = TypeVar("T")

ANSWER_S = 10.0  # timeout of a query for a repository's files
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def find_in_hub(
    name: str, revision: str | None, *, wants_weights: bool, can_open: Callable[[Path], bool], near: Callable[[], str]
) -> Path:
    """Folder (or GGUF file) of a repository in the local cache, downloaded first if it is missing or incomplete.

    ``can_open`` decides whether a folder or GGUF file is complete. Raises `ModelError` with the reason and a remedy;
    ``near()``, a list of similar names, is appended if nothing of that name is found.
    """
    root = _cache_root()
    repository, file = _split(name)
    # without a network first: a complete cached copy is used even if the hub has a newer one
    cached = _cached_folder(repository, revision)
    if cached is not None and can_open(cached / file if file else cached):
        return cached / file if file else cached
    if env.hub_offline():
        held = "its cached copy is incomplete" if cached else "it is not in the cache"
        raise ModelError(
            f"no model {name!r}: no such file, folder or installed package, and the Hugging Face hub may not be asked "
            f"(HF_HUB_OFFLINE is set; {held}, {root}). Unset HF_HUB_OFFLINE, or name a local model{near()}"
        )
    if wants_weights:
        file = _choose_file(_list_files(repository, revision, name, near), repository, file)
    folder = _download(
        repository, revision, [*SMALL_FILES, *([file or "*.safetensors"] if wants_weights else [])], name, near
    )
    return folder / file if file else folder


def cached_names() -> set[str]:
    """Names of the models in the Hugging Face cache."""
    root = _cache_root()
    if not os.path.isdir(root):  # False also without permission
        return set()
    return {folder.name.removeprefix("models--").replace("--", "/") for folder in root.glob("models--*")}


def _split(name: str) -> tuple[str, str | None]:
    if name.count("/") == 2:
        repository, _, file = name.rpartition("/")
        return repository, file
    return name, None


def _cache_root() -> Path:
    env.home()  # sets HOME where there is none: the library reads it when it is imported
    from huggingface_hub import constants  # costs 0.1 s

    return Path(constants.HF_HUB_CACHE)


def _cached_folder(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):  # no cache, or one that others own
        return None


def _list_files(repository: str, revision: str | None, name: str, near: Callable[[], str]) -> list[str]:
    from huggingface_hub import HfApi

    info = _ask(lambda: HfApi().model_info(repository, revision=revision, timeout=ANSWER_S), name, near)
    return [item.rfilename for item in info.siblings or ()]


def _choose_file(files: list[str], repository: str, wanted: str | None) -> str | None:
    """The GGUF file to fetch: the one wanted, or the only one; None when the repository has safetensors."""
    ggufs = sorted(file for file in files if file.endswith(".gguf") and "/" not in file and "mmproj" not in file)
    if wanted in ggufs or (wanted is None and any(file.endswith(".safetensors") for file in files)):
        return wanted
    if wanted is None and len(ggufs) == 1:
        return ggufs[0]
    if not ggufs:
        raise ModelError(f"{repository} on the Hugging Face hub has neither safetensors nor GGUF files")
    raise ModelError(
        f"name one of the GGUF files of {repository}, as in {repository}/{ggufs[0]}; it has {', '.join(ggufs[:8])}"
    )


def _download(repository: str, revision: str | None, patterns: list[str], name: str, near: Callable[[], str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(_ask(lambda: snapshot_download(repository, revision=revision, allow_patterns=patterns), name, near))


def _ask(question: Callable[[], T], name: str, near: Callable[[], str]) -> T:
    """Run a query to the hub; any failure becomes a `ModelError` with a remedy."""
    from huggingface_hub import errors

    try:
        return question()
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms on huggingface.co and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name} has no such revision on the Hugging Face hub; check --revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"no model {name!r}: no such file, folder or installed package, and none of that name on the Hugging Face "
            f"hub (private ones need `hf auth login`){near()}"
        ) from error
    except PermissionError as error:
        raise ModelError(
            f"no model {name!r} here, and {error.filename} cannot be used to fetch it: permission denied. Set HF_HOME "
            "to a folder that can"
        ) from error
    except (
        errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError, errors.HFValidationError, OSError
    ) as error:
        raise ModelError(
            f"no model {name!r}: no such file, folder or installed package, it is not (fully) in the Hugging Face "
            f"cache {_cache_root()}, and the hub cannot be reached: {_first_line(error)}. Go online, copy the model "
            f"here, or name a local one{near()}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
