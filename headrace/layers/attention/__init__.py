"""Attention: the contract, the layer that calls it, and the backends, registered here by the geometries they serve."""

from headrace.layers.attention.contract import ATTENTION_BACKENDS

ATTENTION_BACKENDS.add("reference", "headrace.layers.attention.reference:ReferenceAttention", doc="plain torch, any device and geometry")
