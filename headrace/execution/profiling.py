"""`Profiler`: records with torch's profiler what this process and its device do, into a trace file that browsers
show."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.base.admin import StartProfile
from headrace.base.errors import Conflict, RequestError

logger = logging.getLogger(__name__)


class Profiler:
    """One trace at a time, from `start` to `stop`, or to the last of ``num_steps`` steps."""

    def __init__(self, device: torch.device):
        self._device = device
        self._running: profile | None = None
        self._options: StartProfile | None = None
        self._num_steps = 0
        self._written = ""

    def start(self, options: StartProfile) -> None:
        """Begin; raises `Conflict` when a trace is being recorded, `RequestError` when it could not be written."""
        if self._running is not None:
            raise Conflict("a profile is being recorded; stop it first")
        folder = Path(options.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"the folder for profiles cannot be made: {error.strerror}", param="profile_folder"
            ) from error
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if self._device.type == "cuda" and options.has_device else [])
        ]
        self._options, self._num_steps, self._written = options, 0, ""
        self._running = profile(activities=activities, record_shapes=options.has_shapes, with_stack=options.has_stacks)
        self._running.start()

    def count_step(self) -> None:
        """A step begins. The trace is written once it has ``num_steps`` of them."""
        if self._running is None or self._options is None or self._options.num_steps is None:
            return
        # At the beginning of the next step, as only then all of the last one has been launched.
        if self._num_steps >= self._options.num_steps:
            self._write()
        self._num_steps += 1

    def stop(self) -> str:
        """Write the trace; returns the file's name. Raises `Conflict` when none is or was recorded."""
        if self._running is not None:
            self._write()
        if not self._written:
            raise Conflict("no profile is being recorded")
        written, self._written = self._written, ""
        return written

    def _write(self) -> None:
        assert self._running is not None and self._options is not None
        running, self._running = self._running, None
        running.stop()
        name = time.strftime("headrace-%Y%m%d-%H%M%S") + f"-{time.monotonic_ns() % 10**6:06d}.trace.json"
        running.export_chrome_trace(str(Path(self._options.folder) / name))
        logger.info("profile written: %s", name)
        self._written = name
