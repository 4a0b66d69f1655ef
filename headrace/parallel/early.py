"""`compile_collectives`: what ranks need when they meet, compiled before torch is imported, which takes as long.

Refuses: importing torch, choosing a device, and meeting anybody.
"""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

from headrace.kernels import nvrtc
from headrace.kernels.collective import parts, reason_against
from headrace.kernels.early import find_capability, has_gpu
from headrace.kernels.operation import KernelQuery

logger = logging.getLogger(__name__)

TYPE = "bfloat16"
"""Of the tensors that ranks meet with (`headrace.parallel.push`)."""


def compile_collectives(ranks: int) -> None:
    """Compile on threads what so many ranks of this machine need when they meet, which takes seconds, into the cache,
    where they find it or wait for it. Returns at once; does nothing without a GPU. Ranks compile themselves what fails
    here."""
    if has_gpu():
        Thread(target=_compile_collectives, args=(ranks,), name="collectives", daemon=True).start()


def _compile_collectives(ranks: int) -> None:
    capability = find_capability()
    if capability is None or reason_against(KernelQuery("cuda", TYPE, capability, {"ranks": ranks})):
        return
    try:
        library = nvrtc.open_nvrtc()
        missing = {
            nvrtc.locate(library, *source): source
            for source in parts.list_sources(ranks, parts.TYPES[TYPE], capability)
        }
        with ThreadPoolExecutor(len(missing), "collectives") as threads:  # NVRTC does not hold Python's lock
            for path, source in missing.items():
                if not path.exists():
                    threads.submit(_compile, path, library, source)
    except (OSError, AttributeError) as error:
        logger.debug("collectives are compiled when ranks meet: %s", error)


def _compile(path: Path, library: ctypes.CDLL, source: nvrtc.Source) -> None:
    try:
        nvrtc.compile_into(path, library, *source)
    except nvrtc.CudaSourceError as error:
        logger.debug("left to the ranks: %s", error)
