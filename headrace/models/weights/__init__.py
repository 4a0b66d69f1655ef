"""Readers of safetensors and GGUF files, and random weights. Importing the package imports no torch."""
