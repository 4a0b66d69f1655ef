"""`keep_bytecode`: caches compiled Python of packages that were installed without it, across processes.

Refuses: interfering where Python itself writes bytecode, or was told where to (``PYTHONPYCACHEPREFIX``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from headrace.base import env


@contextmanager
def keep_bytecode(package: str = "torch") -> Iterator[None]:
    """Within, modules are compiled into Headrace's cache and read from there, if ``package`` has no bytecode and would
    not get any: container images are often installed without compiling, and not writable. Compiling torch takes longer
    than importing it. Changes process-wide settings of ``sys`` and restores them at the end."""
    if not _lacks_bytecode(package):
        yield
        return
    before = sys.pycache_prefix, sys.dont_write_bytecode
    sys.pycache_prefix, sys.dont_write_bytecode = str(env.cache_dir() / "bytecode"), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def _lacks_bytecode(package: str) -> bool:
    spec = find_spec(package)
    if sys.pycache_prefix is not None or spec is None or spec.origin is None:
        return False
    is_written = not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
    return not is_written and not Path(cache_from_source(spec.origin)).exists()
