"""`keep_bytecode`: compiled Python of packages that were installed without it, kept from one process to the next.

Refuses: doing so where Python does, or was told where to.
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
    """As long as this lasts, modules are compiled into Headrace's cache and read from there, if ``package`` has no
    bytecode and would not get any: as in images whose installer compiles nothing, and which forbid writing beside the
    sources. Compiling torch takes longer than importing it."""
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
