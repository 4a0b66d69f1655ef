"""Benchmarks that made the figures in docs/benchmarks; run as ``python -m benchmarks.NAME``."""
