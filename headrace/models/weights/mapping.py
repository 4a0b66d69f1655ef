"""Memory-mapped files as torch byte tensors."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from headrace.base.errors import WeightError


def map_file(path: Path) -> torch.Tensor:
    """The file's bytes as uint8 [bytes], read on first touch; unmapped when the last view of it is gone.

    The mapping is private and writable: a write through a view stays in this process, the file never changes.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightError(f"cannot read {path}: {error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def view_bytes(data: torch.Tensor, start: int, num_bytes: int, alignment: int) -> torch.Tensor:
    """Bytes ``[start, start + num_bytes)`` of a mapped file, copied only when their address is not so aligned."""
    part = data[start : start + num_bytes]
    return part if part.data_ptr() % alignment == 0 else part.clone()
