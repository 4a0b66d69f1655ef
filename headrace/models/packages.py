"""Model files installed by pip: found in the package's file list, never by importing the package.

Package indexes limit file sizes, so a large GGUF file may come in parts, in packages NAME-part1, NAME-part2...; the
parts are concatenated once, in the cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from headrace.base import env
from headrace.base.errors import ModelError

_PART_FILE = re.compile(r"(.+\.gguf)\.part-?(\d+)")
_PART_PACKAGE = re.compile(r"(.+?)[-_.]part[-_.]?(\d+)", re.IGNORECASE)
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
MAX_PART_PACKAGES = 1000

_log = logging.getLogger(__name__)


def find_package(name: str) -> Path | None:
    """The model inside the installed package ``name``: a folder with config.json, or a GGUF file.

    For packages ``NAME-part1``, ``NAME-part2``... either ``NAME`` or any of the parts may be given. None when no such
    package is installed; `ModelError` when it is, but holds no model.
    """
    if not _PACKAGE_NAME.fullmatch(name):
        return None
    package = _distribution(name)
    if package is not None:
        files = _files(package)
        ggufs = sorted(file for file in files if file.suffix == ".gguf")
        if len(ggufs) == 1:
            return ggufs[0]
        configs = [
            file for file in files
            if file.name == "config.json" and any(f.suffix == ".safetensors" and f.parent == file.parent for f in files)
        ]
        # subfolders of a model may have a config of their own (sentence-transformers): keep the outermost
        configs = [c for c in configs if not any(other.parent in c.parent.parents for other in configs)]
        if len(configs) == 1:
            return configs[0].parent
        several = ggufs or configs
        if several:
            raise ModelError(
                f"package {name} holds several models; name the path of one: {', '.join(map(str, several))}"
            )
    base = base_of_parts(name)
    parts = find_parts(base)
    if parts:
        return _join(base, parts)
    if package is not None:
        raise ModelError(
            f"package {name} is installed but holds no model: no .gguf file and no config.json beside *.safetensors"
        )
    return None


def installed_names() -> set[str]:
    """Names of the installed packages that hold model files."""
    names = set()
    for package in importlib.metadata.distributions():
        record = package.read_text("RECORD") or ""  # as text: parsing every package's list takes a second
        if ".gguf" in record or ".safetensors," in record:
            names.add(package.name)
    return names


def _distribution(name: str) -> Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except PackageNotFoundError:
        return None


def _files(package: Distribution) -> list[Path]:
    paths = (Path(str(package.locate_file(file))) for file in package.files or ())
    return [path for path in paths if path.is_file()]


def _part_packages(base: str) -> list[tuple[str, list[Path]]]:
    """``(package name, its files)`` of BASE-part1, BASE-part2... as far as they are installed without a gap."""
    found = []
    for number in range(1, MAX_PART_PACKAGES):
        package = _distribution(f"{base}-part{number}")
        if package is None:
            break
        found.append((f"{base}-part{number}", _files(package)))
    return found


def find_parts(base: str) -> list[Path]:
    """The parts of the GGUF file that packages BASE-part1, BASE-part2... hold, in order; empty without such packages.
    Raises `ModelError` unless they are all the parts of one file."""
    packages = _part_packages(base)
    if not packages:
        return []
    numbered: dict[int, Path] = {}
    stems = set()
    for _, files in packages:
        for file in files:
            match = _PART_FILE.fullmatch(file.name)
            if match:
                stems.add(match[1])
                numbered[int(match[2])] = file
    if not numbered:
        raise ModelError(f"packages {packages[0][0]} to {packages[-1][0]} hold no parts of a GGUF file")
    if len(stems) != 1:
        raise ModelError(f"packages of {base} hold parts of several files: {', '.join(sorted(stems))}")
    numbers = sorted(numbered)
    # parts are numbered from 0 or 1
    if numbers[0] not in (0, 1) or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise ModelError(f"parts {numbers} of {stems.pop()} have a gap; install all packages {base}-part1, -part2, ...")
    return [numbered[number] for number in numbers]


def base_of_parts(name: str) -> str:
    """``NAME`` for a package ``NAME-part2``; other names unchanged."""
    match = _PART_PACKAGE.fullmatch(name)
    return match[1] if match else name


def _join(base: str, parts: list[Path]) -> Path:
    match = _PART_FILE.fullmatch(parts[0].name)
    assert match is not None, parts
    try:
        return join_parts(parts, match[1])
    except OSError as error:
        raise ModelError(
            f"cannot join the parts of {base} in {env.cache_dir()} (set HEADRACE_CACHE to a folder with room): {error}"
        ) from error


def join_parts(parts: list[Path], file_name: str) -> Path:
    """Concatenate ``parts`` into one file in the cache folder and return its path; later calls reuse it. Several
    processes may call it at once. The folder's name depends on paths, sizes and times of the parts, so that a
    reinstalled package gets a new file."""
    stats = [part.stat() for part in parts]
    identity = repr([(str(part), stat.st_size, stat.st_mtime_ns) for part, stat in zip(parts, stats, strict=True)])
    folder = env.cache_dir() / "joined" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = folder / file_name
    size = sum(stat.st_size for stat in stats)
    if _has_size(target, size):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not _has_size(target, size):
            _log.info("joining %d parts into %s (%d MB, once)", len(parts), target, size >> 20)
            # written aside, synced and renamed: a crash leaves no file that looks complete
            partial = target.with_suffix(f".{os.getpid()}.partial")
            try:
                with partial.open("wb") as out:
                    for part in parts:
                        with part.open("rb") as source:
                            shutil.copyfileobj(source, out, 1 << 22)
                    out.flush()
                    os.fsync(out.fileno())
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
    return target


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel frees it when the process dies, so no stale lock is left."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
