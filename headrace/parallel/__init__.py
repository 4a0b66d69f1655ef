"""Ranks: what each holds of a model, and how they add up and exchange tensors."""
