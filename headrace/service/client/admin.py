"""`EngineAdmin`: admin operations on one engine (sleep, wake, pause, weights, profile), in an order that is safe for
requests. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from headrace.base.admin import (
    DEVICE_PARTS,
    VITAL_PARTS,
    AcquireMemory,
    DevicePart,
    ReleaseMemory,
    ReplaceWeights,
    StartProfile,
    StopProfile,
)
from headrace.base.errors import Conflict, EngineAsleep

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient

LOADING_TIMEOUT_S = 3600.0
PROFILE_TIMEOUT_S = 600.0
DRAIN_POLL_S = 0.01
ABORT_S = 30.0

SleepMode = Literal["refuse", "abort", "wait"]


class EngineAdmin:
    """Admin operations on one client. Those that change memory or weights run one at a time. A restarted engine process
    is neither paused nor asleep, and has the weights that were loaded last."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._turn = asyncio.Lock()
        self._paused_engine: int | None = None  # a process id: a restarted engine is not paused
        self.weight_version = "default"

    @property
    def is_asleep(self) -> bool:
        """Whether memory that every request needs is released."""
        return self._client.state == "asleep"

    @property
    def is_paused(self) -> bool:
        """Whether generation is held."""
        return self._paused_engine is not None and self._paused_engine == self._client.engine_pid

    async def pause(self, is_paused: bool = True) -> None:
        """Pause all generation, or continue it."""
        await self._client.control("pause" if is_paused else "continue")
        self._paused_engine = self._client.engine_pid if is_paused else None

    async def sleep(
        self, parts: Collection[DevicePart] = DEVICE_PARTS, *, discards_weights: bool = False,
        mode: SleepMode = "refuse"
    ) -> None:
        """Release parts of the device's memory. ``mode`` says what happens while requests run or wait: ``refuse``
        raises `Conflict`, ``abort`` ends them, ``wait`` waits for their end; new ones are refused meanwhile."""
        async with self._turn:
            client, before = self._client, self._client.state
            if mode == "refuse" and client.num_inflight:
                raise Conflict(
                    f"{client.num_inflight} requests are running; wait for their end, or end them with mode abort"
                )
            if before == "ready":
                client.state = "asleep"  # no await before this line: no request may slip in behind the check
            after = before
            try:
                if mode == "abort":
                    await client.abort(None)
                await self._drain(ABORT_S if mode == "abort" else None)
                after = await self._change(ReleaseMemory(list(parts), discards_weights))
            except EngineAsleep:
                after = "asleep"
                raise
            finally:
                self._set_state(after)

    async def wake(self, parts: Collection[DevicePart] = DEVICE_PARTS) -> None:
        """Acquire parts again. Raises `EngineAsleep` when the device has no room for them."""
        async with self._turn:
            self._set_state(await self._change(AcquireMemory(list(parts))))

    async def replace_weights(self, model: str, *, load_format: str = "auto", version: str | None = None) -> int:
        """Serve another checkpoint of the same shapes; returns how many running requests continue with it. On a typed
        error the old weights stay in place."""
        async with self._turn:
            client, num_requests = self._client, self._client.num_inflight
            try:
                await client.control(ReplaceWeights(model, load_format), timeout_s=LOADING_TIMEOUT_S)
            except EngineAsleep:  # the old weights are back, the KV cache has found no room
                self._set_state("asleep")
                raise
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

    async def _change(self, call: ReleaseMemory | AcquireMemory) -> str:
        """Make the call; returns the client's state after it."""
        released = await self._client.control(call, timeout_s=LOADING_TIMEOUT_S)
        return "asleep" if VITAL_PARTS & set(released) else "ready"

    async def _drain(self, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while self._client.num_inflight:
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            raise Conflict(f"{self._client.num_inflight} requests did not end within {limit_s:g} s") from None

    def _set_state(self, state: str) -> None:
        """Set the client's state after a change, unless the engine has died or the server has begun to stop."""
        if self._client.state in ("ready", "asleep"):
            self._client.state = state
