"""Which transfer backends can run here: those of packages need these, and libraries of the system."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache

NEEDS = {"nixl": ("nixl_cu13", "nixl"), "mooncake": ("mooncake.engine",)}


@cache
def is_usable(backend: str) -> bool:
    """Whether the packages of a backend can be imported here, where it needs any."""
    for module in NEEDS.get(backend, ()):
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0
    return backend not in NEEDS
