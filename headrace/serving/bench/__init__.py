"""Benchmarks: a load generator for OpenAI-compatible servers, fixed workloads in process, quality of weight formats."""
