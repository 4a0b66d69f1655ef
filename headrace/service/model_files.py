"""The models on this machine and whether they fit its memory, and fetching more: for ``headrace models`` and ``pull``.

Imports torch when memory is asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.models.hub import Download, pull
from headrace.models.hub_files import read_name
from headrace.models.listing import ListedModel, describe, list_models

__all__ = [
    "Download", "ListedModel", "Memory", "describe", "find_memory", "list_models", "pull", "read_name"
]

FIXED_BYTES = 256 * 2**20
"""Memory beside the weights: activations, and KV for a short context."""


@dataclass(frozen=True)
class Memory:
    """Free memory of the device that ``serve`` would choose: ``device`` is its type."""

    device: str
    free_bytes: int

    def fits(self, model: ListedModel) -> bool:
        """Whether the weights, a tenth more for activations, and a short context fit."""
        return self.needed_bytes(model) <= self.free_bytes

    def needed_bytes(self, model: ListedModel) -> int:
        """Bytes that serving takes at least. GGUF blocks are dequantized to 16 bits on a GPU."""
        bits = re.match(r"I?Q(\d)", model.quantization)
        expansion = 16 / (int(bits[1]) + 0.5) if bits and self.device != "cpu" else 1.0
        return int(model.num_bytes * expansion * 1.1) + FIXED_BYTES


def find_memory() -> Memory:
    """Look at the device through torch."""
    import torch

    from headrace.memory.plan import free_bytes

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Memory(device, free_bytes(torch.device(device)))
