"""What stands where weights and tokenizers should: what a clone without Git LFS leaves, pipes, devices. Torch-free."""

from __future__ import annotations

import stat
from pathlib import Path

from headrace.base.errors import WeightError

POINTER = b"version https://git-lfs.github.com/spec/"


def require_content(path: Path) -> None:
    """Raise `WeightError` for a pointer of Git LFS, for what is no regular file (to open a pipe is to wait for who
    writes to it), and for what cannot be read."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise WeightError(f"{path} is no regular file but a pipe, a socket or a device; name a file")
        with path.open("rb") as file:
            head = file.read(len(POINTER))
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error
    if head == POINTER:
        raise WeightError(
            f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder, or fetch it another "
            "way"
        )
