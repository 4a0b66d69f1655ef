"""`Beside`: work that a GPU computes beside other work of a captured step, as another branch of its graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers: their branches end before the next begin."""
    return torch.cuda.Stream(device)


class Beside:
    """Begins work on a stream of its own in captured steps. Others are computed in order: their launches would take the
    host longer than what is won, and memory of two streams would have to be told apart."""

    def __init__(self, device: torch.device):
        self._side = _side_stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """What returns the result of ``work``, to be called once, behind what is computed meanwhile. Tensors that
        ``work`` reads are kept until then.

        Memory of a capture that one stream gives back goes to the same stream again: the result's is written by a later
        `begin`, behind all that read it before that, and what ``work`` read is free behind the wait for it.
        """
        if self._side is None or not torch.cuda.is_current_stream_capturing():
            return work
        side, current = self._side, torch.cuda.current_stream(self._side.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = work()

        def finish() -> Result:
            current.wait_stream(side)
            return result

        return finish
