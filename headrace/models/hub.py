"""Models on the Hugging Face hub: the local cache first, then, when online, a download. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.base import env
from headrace.base.errors import ModelError
from headrace.models.hub_files import HubName, choose_weights, group_ggufs, is_inside, parse_name, supporting_files
from headrace.models.hub_transfer import transfer

logger = logging.getLogger(__name__)
T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
ANSWER_S = 10.0  # timeout of a query for a repository's files


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. ``num_bytes`` is 0 where the hub does not tell. ``is_here``: it is in the cache."""

    name: str
    num_bytes: int
    is_here: bool


@dataclass(frozen=True)
class Download:
    """What `fetch` is about to do: the files of a model at a commit of its repository."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def missing(self) -> tuple[HubFile, ...]:
        """The files that are fetched."""
        return tuple(file for file in self.files if not file.is_here)


@dataclass(frozen=True)
class _Asker:
    """Who asks the hub, for error messages: ``lead`` begins them, ``near()`` is a list of similar names."""

    name: str
    lead: str
    near: Callable[[], str] = lambda: ""


def find_in_hub(
    name: str, revision: str | None, *, wants_weights: bool, can_open: Callable[[Path], bool], near: Callable[[], str]
) -> Path:
    """Folder (or GGUF file) of a repository in the local cache, downloaded first if it is missing or incomplete.

    ``can_open`` decides whether a folder or GGUF file is complete. Raises `ModelError` with the reason and a remedy;
    ``near()``, a list of similar names, is appended if nothing of that name is found.
    """
    # without a network first: a complete cached copy is used even if the hub has a newer one
    wanted = parse_name(name)
    cached = cached_folder(wanted.repository, revision)
    place = _place_in(cached, wanted) if cached is not None else None
    if place is not None and can_open(place):
        return place
    if env.hub_offline():
        held = _explain_absence(cached, wanted)
        raise ModelError(
            f"no model {name!r}: no such file, folder or installed package, and the Hugging Face hub may not be asked "
            f"(HF_HUB_OFFLINE is set; {held}, {cache_root()}). Unset HF_HUB_OFFLINE, or name a local model{near()}"
        )
    asker = _Asker(name, f"no model {name!r}: no such file, folder or installed package, and ", near)
    return _fetch(wanted, revision, asker, wants_weights=wants_weights)


def pull(name: str, revision: str | None, *, before: Callable[[Download], None]) -> Path:
    """Bring the cached copy of a model up to date with the hub and return its folder or GGUF file. An interrupted
    download goes on where it stopped. ``before`` is called once, when it is known what is missing. Raises `ModelError`
    with the reason and a remedy."""
    if env.hub_offline():
        raise ModelError(f"cannot fetch {name}: HF_HUB_OFFLINE is set; unset it to ask the Hugging Face hub")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(f"cannot fetch {name}: huggingface_hub is not installed; pip install huggingface_hub")
    return _fetch(parse_name(name), revision, _Asker(name, f"cannot fetch {name}: "), before=before)


def cached_names() -> set[str]:
    """Names of the models in the Hugging Face cache."""
    root = cache_root()
    if not os.path.isdir(root):  # False also without permission
        return set()
    return {folder.name.removeprefix("models--").replace("--", "/") for folder in root.glob("models--*")}


def cache_root() -> Path:
    """The folder of cached repositories."""
    env.home()  # sets HOME where there is none: the library reads it when it is imported
    from huggingface_hub import constants  # costs 0.1 s

    return Path(constants.HF_HUB_CACHE)


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """The cached files of a repository at a revision, perhaps not all of them; None if there are none."""
    folder = _repository_folder(repository)
    with contextlib.suppress(OSError):  # a cache that others own
        reference = folder / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision or ""
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and snapshot.is_dir() else None
    return None


def cached_revisions(repository: str) -> list[tuple[str, Path]]:
    """The revisions in the cache with their folders: ``main`` if it is there, else branches and tags, else commits."""
    root = _repository_folder(repository)
    if (main := cached_folder(repository, None)) is not None:
        return [("main", main)]
    files = sorted(path for path in root.glob("refs/**/*") if path.is_file())
    references = [path.relative_to(root / "refs").as_posix() for path in files]
    commits = [path.name for path in sorted(root.glob("snapshots/*"))]
    found = ((name, cached_folder(repository, name)) for name in references or commits)
    return [(name, folder) for name, folder in found if folder is not None]


def _repository_folder(repository: str) -> Path:
    return cache_root() / f"models--{repository.replace('/', '--')}"


def cached_files(folder: Path) -> list[str]:
    """Names of the files of a cached copy."""
    return [str(file.relative_to(folder)) for pattern in ("*", "*/*") for file in sorted(folder.glob(pattern))]


def _place_in(folder: Path, wanted: HubName) -> Path | None:
    """What to open of a cached copy; None if it lacks what is wanted."""
    try:
        chosen = choose_weights(cached_files(folder), wanted)
    except ModelError:
        return folder if wanted.file is None and wanted.tag is None else None
    return folder / chosen.entry if chosen.entry else folder


def _explain_absence(folder: Path | None, wanted: HubName) -> str:
    """Why a cached copy is not what is wanted."""
    if folder is None:
        return "it is not in the cache"
    names = cached_files(folder)
    try:
        choose_weights(names, wanted)
    except ModelError:
        if group_ggufs(names):
            return f"of {wanted.repository} the cache has {', '.join(sorted(group_ggufs(names)))}"
    return "its cached copy is incomplete"


def _fetch(
    wanted: HubName, revision: str | None, asker: _Asker, *, wants_weights: bool = True,
    before: Callable[[Download], None] = lambda _: None
) -> Path:
    env.home()  # sets HOME where there is none: the library reads it when it is imported
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():  # log files get a line per file instead
        disable_progress_bars()
    if not logger.isEnabledFor(logging.DEBUG):
        for name in ("httpx", "httpx2"):  # a line per request
            logging.getLogger(name).setLevel(logging.WARNING)
    info: Any = _ask(
        lambda: HfApi().model_info(wanted.repository, revision=revision, timeout=ANSWER_S, files_metadata=True), asker
    )
    sizes = {item.rfilename: item.size or 0 for item in info.siblings or () if is_inside(item.rfilename)}
    if not _COMMIT.fullmatch(info.sha or ""):
        raise ModelError(f"{asker.lead}the hub names no commit: {info.sha!r}")
    chosen = choose_weights(sizes, wanted) if wants_weights else None
    files = [*supporting_files(sizes), *(chosen.weights if chosen else ())]
    repository = _repository_folder(wanted.repository)
    folder = repository / "snapshots" / info.sha
    download = Download(
        wanted.repository, info.sha, tuple(HubFile(f, sizes.get(f, 0), (folder / f).is_file()) for f in files)
    )
    _require_room(download, asker)
    before(download)
    for file in download.missing:
        logger.info("fetching %s of %s, %.1f MB", file.name, wanted.repository, file.num_bytes / 1e6)
        _ask(partial(transfer, wanted.repository, file.name, info.sha, repository, ANSWER_S), asker)
    # only now: until everything is here, the revision's complete older copy stays in use
    if revision != info.sha:
        _write_reference(repository / "refs" / (revision or "main"), info.sha)
    return folder / chosen.entry if chosen and chosen.entry else folder


def _write_reference(path: Path, commit: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(commit)
    new.replace(path)


def _require_room(download: Download, asker: _Asker) -> None:
    wanted = sum(file.num_bytes for file in download.missing)
    root = cache_root()
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if wanted > free:
        raise ModelError(
            f"{asker.lead}it needs {wanted / 1e9:.1f} GB, and {existing} has {free / 1e9:.1f} GB left. Set HF_HOME to "
            "a folder with room"
        )


def _ask(question: Callable[[], T], asker: _Asker) -> T:
    """Run a query to the hub; any failure becomes a `ModelError` with a remedy."""
    from huggingface_hub import constants, errors

    try:
        return question()
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{asker.name} is gated: accept its terms on huggingface.co and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{asker.name} has no such revision on the Hugging Face hub; check --revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{asker.lead}there is none of that name on the Hugging Face hub (private ones need `hf auth login`)"
            f"{asker.near()}"
        ) from error
    except PermissionError as error:
        raise ModelError(
            f"{asker.lead}{error.filename} cannot be used to fetch it: permission denied. Set HF_HOME to a folder that "
            "can"
        ) from error
    except (
        errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError, errors.HFValidationError, OSError
    ) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"{asker.lead}{cache_root()} is full; set HF_HOME to a folder with room") from error
        raise ModelError(
            f"{asker.lead}it is not (fully) in the Hugging Face cache {cache_root()}, and the hub cannot be reached: "
            f"{_first_line(error)} ({constants.ENDPOINT}). Go online and run the same command again, which goes on "
            f"where it stopped, or name a model that is here (headrace models){asker.near()}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
