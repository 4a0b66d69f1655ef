"""`EngineAdmin`: admin operations on one engine (sleep, wake, pause, weights, profile), in an order that is safe for
requests. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from headrace.base.admin import (
    DEVICE_PARTS,
    AcquireMemory,
    DevicePart,
    ReleaseMemory,
    ReplaceWeights,
    StartProfile,
    StopProfile,
)
from headrace.base.errors import Conflict

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient

LOADING_TIMEOUT_S = 3600.0
PROFILE_TIMEOUT_S = 600.0
DRAIN_POLL_S = 0.01
ABORT_S = 30.0

SleepMode = Literal["refuse", "abort", "wait"]


class EngineAdmin:
    """Admin operations on one client and all its replicas. Those that change memory or weights run one at a time. A
    restarted engine process is neither paused nor asleep, and has the weights that were loaded last."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._turn = asyncio.Lock()
        self._paused: frozenset[int] = frozenset()  # process ids: a restarted engine is not paused
        self.weight_version = "default"

    @property
    def is_asleep(self) -> bool:
        """Whether memory that every request needs is released."""
        return self._client.state == "asleep"

    @property
    def is_paused(self) -> bool:
        """Whether generation is held, by any replica."""
        return not self._paused.isdisjoint(self._client.engine_pids)

    async def pause(self, is_paused: bool = True) -> None:
        """Pause all generation, or continue it."""
        await self._client.control("pause" if is_paused else "continue")
        self._paused = frozenset(filter(None, self._client.engine_pids)) if is_paused else frozenset()

    async def sleep(
        self, parts: Collection[DevicePart] = DEVICE_PARTS, *, discards_weights: bool = False,
        mode: SleepMode = "refuse"
    ) -> None:
        """Release parts of the device's memory. ``mode`` says what happens while requests run or wait: ``refuse``
        raises `Conflict`, ``abort`` ends them, ``wait`` waits for their end, and raises `Conflict` while generation is
        paused; new ones are refused meanwhile."""
        async with self._turn:
            client = self._client
            if mode == "refuse" and client.num_inflight:
                raise Conflict(
                    f"{client.num_inflight} requests are running; wait for their end, or end them with mode abort"
                )
            client.is_held = True  # no await before this line: no request may slip in behind the check
            try:
                if mode == "abort":
                    await client.abort(None)
                await self._drain(ABORT_S if mode == "abort" else None)
                await client.control(ReleaseMemory(list(parts), discards_weights), timeout_s=LOADING_TIMEOUT_S)
            finally:
                client.is_held = False

    async def wake(self, parts: Collection[DevicePart] = DEVICE_PARTS) -> None:
        """Acquire parts again. Raises `EngineAsleep` when the device has no room for them."""
        async with self._turn:
            await self._client.control(AcquireMemory(list(parts)), timeout_s=LOADING_TIMEOUT_S)

    async def replace_weights(self, model: str, *, load_format: str = "auto", version: str | None = None) -> int:
        """Serve another checkpoint of the same shapes; returns how many running requests continue with it. On a typed
        error the old weights stay in place."""
        async with self._turn:
            client, num_requests = self._client, self._client.num_inflight
            # `EngineAsleep`: the old weights are back, the KV cache has found no room
            await client.control(ReplaceWeights(model, load_format), timeout_s=LOADING_TIMEOUT_S)
            config = client.config  # for the next start of the engine: a restart must load the new weights
            client.config = replace(
                config, model=replace(config.model, model=model, load_format=load_format, revision=None)
            )
            self.weight_version = version or self.weight_version
            return num_requests

    async def start_profile(self, options: StartProfile) -> None:
        """Start a trace."""
        await self._client.control(options)

    async def stop_profile(self) -> str:
        """End it; returns the name of its file in the folder."""
        name: str = await self._client.control(StopProfile(), timeout_s=PROFILE_TIMEOUT_S)
        return name

    async def _drain(self, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while self._client.num_inflight:
                    if limit_s is None and self.is_paused:
                        raise Conflict(
                            f"generation is paused, and {self._client.num_inflight} requests cannot end; continue it, "
                            "or end them with mode abort"
                        )
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            raise Conflict(f"{self._client.num_inflight} requests did not end within {limit_s:g} s") from None
