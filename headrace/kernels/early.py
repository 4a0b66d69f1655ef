"""`start_early`: what a start begins before it imports torch, which takes seconds: the processes that compile, and the
CUDA driver. Refuses: importing torch, and choosing a device.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from threading import Thread

from headrace.kernels.compile_workers import find_workers

logger = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""There is one of these where there is an NVIDIA GPU; found without torch."""
CAPABILITY = (75, 76)
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`` and ``_MINOR``"""


def start_early() -> None:
    """On a machine with an NVIDIA GPU, `open_driver`. At the first start there, start the processes that compile, too:
    each of them imports torch, and they are ready when the first kernels are found."""
    if not open_driver():
        return
    workers = find_workers()
    if workers is not None and not workers.were_started:
        workers.start()


def find_capability() -> tuple[int, int] | None:
    """The compute capability of the first GPU that this process sees; None where there is none.
    Initialises the driver, without torch."""
    try:
        driver, device, number = ctypes.CDLL(DRIVER), ctypes.c_int(), ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return None
        found = []
        for attribute in CAPABILITY:
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            found.append(number.value)
        return found[0], found[1]
    except (OSError, AttributeError):
        return None


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU, as far as the system tells."""
    return any(path.exists() for path in DRIVER_FILES)


def open_driver() -> bool:
    """Initialise the CUDA driver on a thread, which takes the driver up to a second and holds none of Python's locks.
    Returns at once; False where there is no GPU. CUDA must not be used in forked copies of the process."""
    if not has_gpu():
        return False
    Thread(target=_initialise, name="cuda-driver", daemon=True).start()
    return True


def _initialise() -> None:
    try:
        code = ctypes.CDLL(DRIVER).cuInit(0)
    except (OSError, AttributeError) as error:
        logger.debug("the CUDA driver cannot be opened: %s", error)  # torch says more when it is asked for a device
        return
    if code:
        logger.debug("the CUDA driver cannot be initialised: error %d", code)
