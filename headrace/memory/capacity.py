"""How much memory is left: on a GPU, or for this process on the host (containers set limits below the machine's)."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from headrace.base.control_groups import find_groups

VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
)
"""Of control groups: the files of limit and use, and the line of ``memory.stat`` that tells of file pages nobody
needs."""


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    left = [_left_by(folder, *names) for folder in find_groups("memory") for names in VERSIONS]
    return min([psutil.virtual_memory().available, *(count for count in left if count is not None)])


def _left_by(folder: Path, limit_file: str, used_file: str, reclaimable: str) -> int | None:
    """What a control group still allows; None when it sets no limit. Reclaimable file pages are free."""
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get(reclaimable, 0))) if limit.isdigit() else None
    except (OSError, ValueError):
        return None
