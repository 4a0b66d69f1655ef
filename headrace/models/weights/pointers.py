"""Files that stand for others: what a clone without Git LFS leaves in place of weights and tokenizers. Torch-free."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import WeightError

POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raise `WeightError` for a pointer of Git LFS, and for what cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(len(POINTER))
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error
    if head == POINTER:
        raise WeightError(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder, or fetch it another way")
