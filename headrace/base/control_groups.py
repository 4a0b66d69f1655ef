"""Control groups of this process, where containers and services have their limits: its own and those around it, in
either version of the file system. Refuses: knowing what is limited.
"""

from __future__ import annotations

from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def find_groups(controller: str) -> list[Path]:
    """Folders that may hold a limit of a controller (``cpu``, ``memory``), innermost first; inside a container the
    outermost is the container's own. Some may not exist."""
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            own = root / name.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent == root or root in parent.parents)]
    return folders
