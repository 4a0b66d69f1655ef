"""How much memory is left: on a GPU, or for this process on the host (containers set limits below the machine's)."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit = _cgroup_free(CGROUP)
    return available if limit is None else min(available, limit)


def _cgroup_free(folder: Path) -> int | None:
    """What the control group (version 2) still allows; None when it sets no limit. Reclaimable file pages are free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        reclaimable = [line.split()[1] for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("inactive_file ")]
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return max(0, int(limit) - used + sum(map(int, reclaimable)))
