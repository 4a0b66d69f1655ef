"""Headrace in a program: `LLM` and `AsyncLLM`, without a server."""
