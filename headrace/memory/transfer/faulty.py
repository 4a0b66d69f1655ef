"""`FaultyBackend`: shared memory with the faults of networks, for tests of everything above it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from headrace.base.errors import ConfigError, TransferFailed
from headrace.memory.transfer.contract import AnyRegion, Copy, refuse_unknown
from headrace.memory.transfer.shared_memory import SharedDestination, SharedMemory

FAULTS = ("drop", "duplicate", "corrupt", "refuse")


class FaultyBackend(SharedMemory):
    """Options: ``drop``, ``duplicate``, ``corrupt``, ``refuse`` are probabilities for each write, ``delay`` its
    largest delay in seconds, ``seed`` that of the random numbers."""

    def __init__(self, region: AnyRegion, options: Mapping[str, str]):
        refuse_unknown(options, (*FAULTS, "delay", "seed"))
        super().__init__(region, {})
        try:
            self._rates = {name: float(options.get(name, 0.0)) for name in FAULTS}
            self._delay_s = float(options.get("delay", 0.0))
            self._random = random.Random(int(options.get("seed", 0)))
        except ValueError as error:
            raise ConfigError(f"options of the transfer backend are numbers: {error}") from error

    def connect(self, handle: bytes) -> SharedDestination:
        """See `TransferBackend`."""
        return _FaultyDestination(super().connect(handle), self._region, self._rates, self._delay_s, self._random)


class _FaultyDestination(SharedDestination):
    def __init__(
        self, inner: SharedDestination, region: AnyRegion, rates: Mapping[str, float], delay_s: float,
        dice: random.Random,
    ):
        super().__init__(region, inner.peer)
        self._rates, self._delay_s, self._random = rates, delay_s, dice

    def write(self, copies: Sequence[Copy]) -> None:
        """See `Destination`."""
        for copy in copies:
            time.sleep(self._random.random() * self._delay_s)
            if self._happens("refuse"):
                raise TransferFailed("the test connector refused a write")
            if self._happens("drop"):
                continue
            super().write([copy])
            if self._happens("duplicate"):
                super().write([copy])
            if self._happens("corrupt") and copy.num_bytes:
                self.peer.data[copy.target + self._random.randrange(copy.num_bytes)] ^= 1 << self._random.randrange(8)

    def _happens(self, fault: str) -> bool:
        return self._random.random() < self._rates[fault]
