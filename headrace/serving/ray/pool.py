"""`ReplicaPool`: replicas on a Ray cluster that answer shards. Replicas come and go; a shard whose replica was lost is
answered by another. Refuses: files (``shards.py``)."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.base.errors import EngineGivenUp
from headrace.base.messages import ErrorInfo
from headrace.service.cluster import ReplicaPlan, living_nodes, require_ray
from headrace.serving.ray.replica import BatchReplica, ShardResult, encode_lines
from headrace.serving.ray.shards import Shard

logger = logging.getLogger(__name__)

SHARDS_AT_ONCE = 2
"""Shards in progress per replica: the next one fills the steps that the end of one leaves half empty."""
MOST_TRIES = 5
"""A shard that so many replicas were lost with is not tried again."""
MOST_FAILED_STARTS = 5
"""Failed starts in a row, with no replica left, after which the run ends."""
POLL_S = 2.0
LONGEST_PAUSE_S = 10.0
REPORT_S = 30.0


@dataclass(order=True)
class _Task:
    """A shard to be answered. Earlier shards go first."""

    number: int
    shard: Shard = field(compare=False)
    lines: bytes = field(compare=False)
    num_tries: int = field(default=0, compare=False)


@dataclass(eq=False)
class _Member:
    """A replica. ``runs``: what it works on, by reference."""

    actor: Any
    group: Any = None
    runs: dict[Any, _Task] = field(default_factory=dict)
    is_ready: bool = False


class ReplicaPool:
    """``num_replicas`` None: as many as the cluster holds, while it grows and shrinks. ``setup`` is an encoded
    `ReplicaSetup`. Use it as a context manager: the end kills the replicas."""

    def __init__(self, setup: bytes, plan: ReplicaPlan, num_replicas: int | None):
        self._ray = require_ray()
        self._setup = setup
        self._plan = plan
        self._num_replicas = num_replicas
        self._members: list[_Member] = []
        self._owners: dict[Any, _Member] = {}  # by reference: of starts and of runs
        self._again: list[_Task] = []  # a heap
        self._source: Iterator[Shard] | None = None
        self._num_failed_starts = 0
        self._starts_at = self._reports_at = 0.0
        self._was_ready = False

    def __enter__(self) -> ReplicaPool:
        return self

    def __exit__(self, *_: object) -> None:
        for member in list(self._members):
            self._remove(member)

    @property
    def num_ready(self) -> int:
        """Replicas that work."""
        return sum(member.is_ready for member in self._members)

    def run(self, shards: Iterator[Shard]) -> Iterator[tuple[Shard, ShardResult]]:
        """Answer shards, which are taken as replicas have room for them. Results come as they are known; one with an
        error is of a shard that lost `MOST_TRIES` replicas. Raises what keeps the first replica from starting, and
        `EngineGivenUp` when none can be started any more."""
        self._source = shards
        self._reports_at = time.monotonic() + REPORT_S
        if (first := self._next_task()) is None:
            return
        heapq.heappush(self._again, first)
        while self._again or self._source is not None or any(member.runs for member in self._members):
            self._scale()
            self._assign()
            if not self._owners:  # no replica, until the pause after a failed start is over
                time.sleep(min(POLL_S, max(0.0, self._starts_at - time.monotonic())))
                continue
            for reference in self._ray.wait(list(self._owners), timeout=POLL_S)[0]:
                yield from self._take(reference)
            self._report()

    def _next_task(self) -> _Task | None:
        if self._again:
            return heapq.heappop(self._again)
        shard = next(self._source, None) if self._source is not None else None
        if shard is None:
            self._source = None
            return None
        return _Task(shard.number, shard, encode_lines(shard.items))

    def _scale(self) -> None:
        """Start the replicas that are missing, unless nothing is left for them."""
        now = time.monotonic()
        if now < self._starts_at or not (self._again or self._source is not None):
            return
        wanted = self._num_replicas or max(1, self._plan.count_fitting())
        for _ in range(wanted - len(self._members)):
            member = self._start()
            self._members.append(member)
            self._owners[member.actor.start.remote()] = member

    def _start(self) -> _Member:
        """A replica whose actor is, or waits to be, in the first bundle of a placement group of its own."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own, group, strategy = self._plan.own, None, "SPREAD"
        if len(self._plan.bundles) > 1:
            group = placement_group(self._plan.bundles, strategy="PACK")
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = self._ray.remote(BatchReplica).options(
            num_cpus=own.num_cpus, num_gpus=own.num_gpus, max_restarts=0, max_concurrency=2 * SHARDS_AT_ONCE,
            scheduling_strategy=strategy,
        ).remote(self._setup)
        return _Member(actor, group)

    def _assign(self) -> None:
        """Give work to replicas that have room, one shard each in turn."""
        for room in range(SHARDS_AT_ONCE):
            for member in self._members:
                if not member.is_ready or len(member.runs) > room:
                    continue
                if (task := self._next_task()) is None:
                    return
                reference = member.actor.run.remote(task.lines)
                member.runs[reference] = task
                self._owners[reference] = member

    def _take(self, reference: Any) -> Iterator[tuple[Shard, ShardResult]]:
        member = self._owners.pop(reference, None)
        if member is None:  # its replica was lost with another reference
            return
        try:
            answer: bytes = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            yield from self._lose(member, reference, ErrorInfo.of(error))
            return
        if reference not in member.runs:
            yield from self._take_start(member, reference, answer)
            return
        result = msgspec.msgpack.decode(answer, type=ShardResult)
        if result.error is not None:
            yield from self._lose(member, reference, result.error)
        else:
            yield member.runs.pop(reference).shard, result

    def _take_start(self, member: _Member, reference: Any, answer: bytes) -> Iterator[tuple[Shard, ShardResult]]:
        if not answer:
            member.is_ready = self._was_ready = True
            self._num_failed_starts = 0
            return
        error = msgspec.msgpack.decode(answer, type=ErrorInfo)
        if not self._was_ready:  # the configuration is wrong, and would be again
            raise error.to_error()
        yield from self._lose(member, reference, error)

    def _lose(self, member: _Member, reference: Any, error: ErrorInfo) -> Iterator[tuple[Shard, ShardResult]]:
        """Replace a replica; what it worked on is done again."""
        reason = error.message.strip().splitlines()[0][:300] if error.message.strip() else error.kind
        logger.warning("a replica is lost and replaced; %d shards are done again: %s", len(member.runs), reason)
        self._remove(member)
        if not member.is_ready:
            self._num_failed_starts += 1
            self._starts_at = time.monotonic() + min(LONGEST_PAUSE_S, 0.5 * 2**self._num_failed_starts)
            if self._num_failed_starts >= MOST_FAILED_STARTS and not self.num_ready:
                raise EngineGivenUp(f"no replica can be started: {reason}; run the batch again to continue")
        for task in member.runs.values():
            task.num_tries += 1
            if task.num_tries < MOST_TRIES:
                heapq.heappush(self._again, task)
            else:
                yield task.shard, ShardResult(error=error)

    def _remove(self, member: _Member) -> None:
        self._members.remove(member)
        self._owners = {reference: owner for reference, owner in self._owners.items() if owner is not member}
        self._ray.kill(member.actor)
        if member.group is not None:
            self._ray.util.remove_placement_group(member.group)

    def _report(self) -> None:
        """Say from time to time what is waited for, if no replica works."""
        now = time.monotonic()
        if self.num_ready:
            self._reports_at = now + REPORT_S
        elif now >= self._reports_at:
            self._reports_at = now + REPORT_S
            logger.warning(
                "no replica is ready; %d are starting or wait for %s each; the nodes have: %s", len(self._members),
                self._plan.describe(),
                "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in living_nodes())
            )
