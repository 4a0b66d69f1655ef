"""`StageLinks`: how hidden states get from one pipeline stage to the next; `Handover`: those of a step. T tokens, W
numbers per token.

Each rank sends to the rank of the same number in the next stage. Both ends call in the order of the plans.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist

from headrace.parallel.layout import Layout


class StageLinks:
    """Those of a rank without neighbours; the base class of others."""

    has_previous: bool = False
    has_next: bool = False

    def receive(self, out: torch.Tensor) -> None:
        """Write what the stage before sends into ``out`` [T, W], contiguous. On a CPU waits for it."""

    def send(self, x: torch.Tensor) -> None:
        """Send ``x`` [T, W] to the next stage. Waits for nobody; nothing may overwrite ``x`` afterwards."""

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """While the body runs, nothing is sent, and zeros are received; see `headrace.parallel.group.Group.muted`."""
        yield


class TorchLinks(StageLinks):
    """Over ``torch.distributed``'s group of all ranks: NCCL between GPUs, Gloo between CPUs."""

    def __init__(self, layout: Layout):
        self._previous, self._next = layout.previous, layout.next
        self.has_previous, self.has_next = layout.previous is not None, layout.next is not None
        self._most = layout.pipeline
        self._sent: deque[tuple[torch.Tensor, dist.Work | None]] = deque()
        self._is_muted = False

    def receive(self, out: torch.Tensor) -> None:
        """See `StageLinks`."""
        if self._is_muted:
            out.zero_()
        else:
            dist.recv(out, src=self._previous)

    def send(self, x: torch.Tensor) -> None:
        """See `StageLinks`."""
        if self._is_muted:
            return
        x = x.contiguous()
        # The tensor must live until it has arrived. With as many plans in flight as stages, one that was sent so many
        # sends ago has: its step was committed before the latest was planned.
        self._sent.append((x, dist.isend(x, dst=self._next)))
        while len(self._sent) > self._most:
            _, work = self._sent.popleft()
            if work is not None:
                work.wait()

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """See `StageLinks`."""
        was_muted, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = was_muted


class Handover:
    """What the stage before sent is in ``carried`` [max T, W], at a fixed address, so that captured graphs can read it;
    None in the first stage. It is received before a graph is replayed, and the output is sent behind it. By default
    there is one stage."""

    def __init__(self, links: StageLinks | None = None, carried: torch.Tensor | None = None):
        self._links, self._carried = links or StageLinks(), carried

    @property
    def is_last(self) -> bool:
        """Whether this stage ends with hidden states that can be sampled from."""
        return not self._links.has_next

    def view(self, count: int) -> torch.Tensor | None:
        """``ForwardBatch.carried`` of ``count`` tokens."""
        return None if self._carried is None else self._carried[:count]

    def receive(self, count: int) -> None:
        """Receive what the stage before computed for ``count`` tokens, if there is one."""
        if self._carried is not None:
            self._links.receive(self._carried[:count])

    def pass_on(self, hidden: torch.Tensor) -> bool:
        """Send ``hidden`` [T, W] to the next stage; False if there is none. It may be overwritten afterwards."""
        if self.is_last:
            return False
        self._links.send(hidden.clone())
        return True
