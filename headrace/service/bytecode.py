"""`keep_bytecode`: caches compiled Python of packages that were installed without it, across processes. The first
process writes nothing while it imports, which would take half as long again; one of low priority writes behind it.

Refuses: interfering where Python itself writes bytecode, or was told where to (``PYTHONPYCACHEPREFIX``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType

from headrace.base import env


@contextmanager
def keep_bytecode(package: str = "torch") -> Iterator[None]:
    """Within, modules are compiled into Headrace's cache and read from there, if ``package`` has no bytecode and would
    not get any: container images are often installed without compiling, and not writable. Compiling torch takes longer
    than importing it. Changes process-wide settings of ``sys`` and restores them at the end."""
    if not _lacks_bytecode(package):
        yield
        return
    before, folder = (sys.pycache_prefix, sys.dont_write_bytecode), env.cache_dir() / "bytecode"
    is_first = _is_first(folder)
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), is_first
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before
        if is_first and package in sys.modules:
            _write_behind(folder)


@cache
def _is_first(folder: Path) -> bool:
    """Whether nothing was written there when this process first asked."""
    return not folder.exists()


WRITE = """
import os, py_compile, sys
from importlib.util import cache_from_source
os.nice(19)
for path in sys.stdin.read().splitlines():
    if not os.path.exists(cache_from_source(path)):
        py_compile.compile(path, quiet=2)
"""


def _write_behind(folder: Path) -> None:
    """Have the bytecode of all modules that are imported now written by another process."""
    with suppress(OSError):  # it is only slower
        folder.mkdir(parents=True, exist_ok=True)
        writer = subprocess.Popen(
            [sys.executable, "-I", "-X", f"pycache_prefix={folder}", "-c", WRITE], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        )
        modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        files = {str(vars(module).get("__file__")) for module in modules}
        paths = "\n".join(sorted(path for path in files if path.endswith(".py")))
        Thread(target=writer.communicate, args=(paths,), name="bytecode", daemon=True).start()


def _lacks_bytecode(package: str) -> bool:
    spec = find_spec(package)
    if sys.pycache_prefix is not None or spec is None or spec.origin is None:
        return False
    is_written = not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
    return not is_written and not Path(cache_from_source(spec.origin)).exists()
