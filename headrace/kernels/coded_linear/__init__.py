"""Weights of quantised checkpoints: their common form, and products with them."""
