"""Copies between the regions of two engines. Torch-free: used by transfer agents, which are processes of their own."""
