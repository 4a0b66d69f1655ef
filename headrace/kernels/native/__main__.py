"""``python -m headrace.kernels.native``: compiles the CPU kernels ahead of the first start, as ``make install`` does.
Prints what it does; exit code 0, or 1 where there are no kernels and plain torch will serve."""

from __future__ import annotations

import logging
import sys
import time

from headrace.base.errors import ConfigError
from headrace.kernels.native.loading import NATIVE, OFF, build

PERIOD_S = 2.0
"""Least time between two lines of progress where the output is no terminal."""


class Progress:
    """Prints how many files are compiled: in place on a terminal, else as lines."""

    def __init__(self) -> None:
        self._began = self._told_at = time.monotonic()
        self._is_terminal = sys.stdout.isatty()

    def show(self, num_done: int, num_files: int) -> None:
        """Called as files are compiled."""
        now, is_last = time.monotonic(), num_done == num_files
        if not self._is_terminal and not is_last and num_done and now - self._told_at < PERIOD_S:
            return
        self._told_at = now
        line = f"compiling the CPU kernels: {num_done} of {num_files} files, {now - self._began:.0f} s"
        if self._is_terminal:
            _write("\r" + line + "\n" * is_last)
        else:
            _write(line + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> int:
    """Compile what is missing; returns the exit code."""
    logging.basicConfig(level=logging.ERROR)  # what is logged as a warning is printed below
    try:
        if NATIVE.inspect().status == "idle":
            _write("compiling the CPU kernels, once: about half a minute ...\n")
        state = build(report=Progress().show)
    except ConfigError as error:
        _write(f"the CPU kernels are not compiled: {error}\n")
        return 1
    if state.status in ("ready", OFF):
        _write(f"CPU kernels: {state.detail}\n")
        return 0
    _write(f"the CPU kernels are not compiled: {state.detail}. Everything works without them, several times slower\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
