"""`ParallelLayout`: over how many devices each axis of the computation is spread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the axes: tensor, pipeline, expert and data parallelism."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of one deployment; experts share the devices of the other axes."""
        return self.tp * self.pp * self.dp
