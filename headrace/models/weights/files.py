"""Checks files before they are opened, and memory-maps weight files. Importing the module imports no torch."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.errors import WeightError

if TYPE_CHECKING:
    import torch

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of the text file that a clone without Git LFS has in place of a large file."""


def require_content(path: Path) -> None:
    """Raise `WeightError` for a Git LFS pointer, a pipe, socket or device (opening a pipe blocks until it has a
    writer), and a file that cannot be read."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise WeightError(f"{path} is no regular file but a pipe, a socket or a device; name a file")
        with path.open("rb") as file:
            head = file.read(len(LFS_POINTER))
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error
    if head == LFS_POINTER:
        raise WeightError(
            f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder, or fetch it another "
            "way"
        )


def map_file(path: Path) -> torch.Tensor:
    """The file as uint8 [bytes], memory-mapped: pages are read on first access; unmapped with the last view.

    The mapping is private and writable (copy-on-write): a write through a view never reaches the file.
    """
    import torch

    try:
        with path.open("rb") as file:
            # the mapping outlives the closed file; ACCESS_COPY, as torch wants a writable buffer
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightError(f"cannot read {path}: {error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def view_bytes(data: torch.Tensor, start: int, num_bytes: int, alignment: int) -> torch.Tensor:
    """Bytes ``[start, start + num_bytes)`` of a mapped file, as a view; copied if their address is not a multiple of
    ``alignment``, since torch can view bytes as a wider dtype only at aligned addresses."""
    part = data[start : start + num_bytes]
    return part if part.data_ptr() % alignment == 0 else part.clone()
