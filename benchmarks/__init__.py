"""Benchmarks that made the figures in docs/benchmarks; run as ``python -m benchmarks.NAME``. Each ends with what fell
back, see `benchmarks.fallbacks`."""

import atexit

from benchmarks.fallbacks import tell

atexit.register(tell)
