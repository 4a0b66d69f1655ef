"""`StepGate`: replicas that divide experts take every step together. `Board`: the shared memory in which they agree.

Each step of any replica needs all of them, as each has some of the experts. Before a step a replica posts how many
tokens it has, and waits for the others to post theirs: that is a *round*. One without requests is woken, posts 0 and
computes its experts for the others. When nobody has a step, all sleep. Torch-free.

Board layout: a line of 64 bytes, whose first word is the port where ranks meet; then a line for each replica: its posts
in rounds of even and of odd number, each ``round * 2**32 + tokens``, how many meetings it has come to, and its
heartbeats, by which one that was stopped is noticed. A post is one word, so nothing depends on the order in which
stores become visible. Nobody can be two rounds ahead of another, so two posts are enough.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, EngineBroken, EngineUnavailable, HeadraceError
from headrace.base.step import StepPlan
from headrace.service.ending import end_with
from headrace.service.ranks.heartbeats import BEAT_S, Silence

LINE_WORDS, WORD_BYTES = 8, 8
ROUND_SHIFT = 32
MEETINGS, BEATS = 2, 3
"""Places in a replica's line, behind the two posts."""
IDLE_STEP = -2
"""``step_id`` of steps in which a replica computes others' tokens alone."""
SPIN_S = 5e-5
SLEEP_MS = 10
"""Longest sleep before a replica looks itself: a wake-up may be lost where stores are not ordered."""
ROUND_S = 1800.0
"""How long a replica waits for the others to post: they may be loading weights. Those that died are noticed by their
supervisors, and those that were stopped by their heartbeats, far earlier."""
MEETING_S = 60.0


class Board:
    """The memory and a wake-up descriptor for each replica, made by the process that starts them, which inherit
    ``descriptors``."""

    def __init__(self, size: int):
        if sys.platform != "linux":
            raise ConfigError("replicas that divide experts need Linux", param="enable_expert_parallel")
        memory = os.memfd_create("headrace-board", os.MFD_CLOEXEC)
        os.ftruncate(memory, LINE_WORDS * WORD_BYTES * (1 + size))
        wakers = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(size))
        self.descriptors: tuple[int, ...] = (memory, *wakers)

    def close(self) -> None:
        """Close the descriptors here."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class StepGate:
    """That of an engine whose steps concern nobody else; the base class of `BoardGate`. ``waker``: a descriptor that
    becomes readable when others wait for this replica."""

    waker: int | None = None

    def admit(self, plan: StepPlan) -> StepPlan:
        """Wait until the step may be launched; returns the plan with what must be known of other replicas."""
        return plan

    def find_idle_step(self) -> StepPlan | None:
        """Called between steps: a step that others wait for, if this replica has had none of its own since the last
        call."""
        return None

    def meet(self, take_part: Callable[[StepPlan], object]) -> None:
        """Wait until all replicas have come to make the same change. Steps that others begin before they come go to
        ``take_part``. Raises `EngineBroken` when some do not come."""

    def close(self) -> None:
        """Leave."""


class BoardGate(StepGate):
    """That of replica ``replica`` over an inherited board, whose descriptors it takes over. ``on_silence`` is called
    once, from a thread, with the typed error when another one was stopped, whatever this one does or waits for: it may
    hang in a collective of a step. By default it ends this process."""

    def __init__(
        self, descriptors: tuple[int, ...], replica: int, *, round_s: float = ROUND_S,
        on_silence: Callable[[HeadraceError], Any] = end_with,
    ):
        self._memory, *self._wakers = descriptors
        self.replica, self.size, self.waker = replica, len(self._wakers), self._wakers[replica]
        self._map = mmap.mmap(self._memory, LINE_WORDS * WORD_BYTES * (1 + self.size))
        self._words = memoryview(self._map).cast("Q")
        self._round = self._meetings = 0
        self._round_s, self._on_silence = round_s, on_silence
        self._has_stepped = False
        self._poll = select.poll()
        self._poll.register(self.waker, select.POLLIN)
        self._is_closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="board-heartbeat", daemon=True)
        self._beating.start()

    @property
    def port(self) -> int:
        """Where ranks meet; waits for the first replica to say so. Raises `EngineUnavailable`."""
        self._await(lambda: self._words[0] > 0, self._round_s, "replica 0 has not said where ranks meet")
        return self._words[0]

    @port.setter
    def port(self, port: int) -> None:
        self._words[0] = port
        self._wake_others()

    def admit(self, plan: StepPlan) -> StepPlan:
        """See `StepGate`."""
        self._has_stepped = True
        return msgspec.structs.replace(plan, replica_tokens=self._agree(sum(plan.lengths)))

    def find_idle_step(self) -> StepPlan | None:
        """See `StepGate`."""
        self._drain()
        has_stepped, self._has_stepped = self._has_stepped, False
        if has_stepped or not self._is_behind():
            return None
        return StepPlan(IDLE_STEP, 0, [], [], [], [], replica_tokens=self._agree(0))

    def meet(self, take_part: Callable[[StepPlan], object]) -> None:
        """See `StepGate`."""
        self._meetings += 1
        self._words[self._line(self.replica) + MEETINGS] = self._meetings
        self._wake_others()

        def has_met() -> bool:
            while self._is_behind():
                take_part(StepPlan(IDLE_STEP, 0, [], [], [], [], replica_tokens=self._agree(0)))
            return all(self._words[self._line(r) + MEETINGS] >= self._meetings for r in range(self.size))

        try:
            self._await(has_met, MEETING_S, "not all replicas were told to make this change")
        except EngineUnavailable as error:  # from here on they would differ
            raise _broken(error) from error

    def close(self) -> None:
        """See `StepGate`."""
        self._is_closed.set()
        self._beating.join()
        self._words[self._line(self.replica) + BEATS] = 0
        self._words.release()
        self._map.close()
        for descriptor in (self._memory, *self._wakers):
            os.close(descriptor)

    def _agree(self, num_tokens: int) -> list[int]:
        """Take part in the next round; returns the tokens of every replica."""
        number = self._round + 1
        self._words[self._line(self.replica) + number % 2] = number << ROUND_SHIFT | num_tokens
        self._wake_others()
        posts: list[int] = []

        def have_all_posted() -> bool:
            posts[:] = [self._words[self._line(r) + number % 2] for r in range(self.size)]
            return all(post >> ROUND_SHIFT == number for post in posts)

        try:
            self._await(have_all_posted, self._round_s, "replicas have not come to a step")
        except EngineUnavailable as error:  # this one has posted, and cannot take that back
            raise _broken(error) from error
        self._round = number
        return [post & ((1 << ROUND_SHIFT) - 1) for post in posts]

    def _beat(self) -> None:
        others = {replica: Silence(BEAT_S) for replica in range(self.size) if replica != self.replica}
        while not self._is_closed.wait(BEAT_S):
            self._words[self._line(self.replica) + BEATS] += 1
            for replica, silence in others.items():
                beats = self._words[self._line(replica) + BEATS]
                if silence.note(beats) and beats:  # none: its process is starting, or has left
                    unavailable = EngineUnavailable(f"replica {replica} gives no sign of life", retry_after=1.0)
                    self._on_silence(_broken(unavailable))
                    return

    def _is_behind(self) -> bool:
        """Whether another replica is in a later round."""
        lines = (self._line(r) for r in range(self.size))
        return any(self._words[line + parity] >> ROUND_SHIFT > self._round for line in lines for parity in (0, 1))

    def _line(self, replica: int) -> int:
        return LINE_WORDS * (1 + replica)

    def _wake_others(self) -> None:
        for replica, waker in enumerate(self._wakers):
            if replica != self.replica:
                with contextlib.suppress(BlockingIOError):  # 2 ** 64 - 2 unread wake-ups
                    os.eventfd_write(waker, 1)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakers[self.replica])

    def _await(self, is_so: Callable[[], bool], limit_s: float, complaint: str) -> None:
        began = time.monotonic()
        while not is_so():
            waited_s = time.monotonic() - began
            if waited_s > limit_s:
                raise EngineUnavailable(f"{complaint} (waited {limit_s:.0f} s)", retry_after=1.0)
            if waited_s < SPIN_S:
                os.sched_yield()
            elif self._poll.poll(SLEEP_MS):
                self._drain()


def _broken(error: EngineUnavailable) -> EngineBroken:
    return EngineBroken(f"{error.message}; the engines restart", retry_after=1.0)
