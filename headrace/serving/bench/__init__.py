"""Benchmarks: a load generator for any OpenAI-compatible server, and fixed workloads in process."""
