"""`Decodes`: a step of decodes alone, in the order in which the device computes it. The next step of the same rows is
made of it, one token on. R requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.base.step import StepPlan
from headrace.execution.rows import Rows
from headrace.execution.sampling import SampleBatch


@dataclass(frozen=True, slots=True)
class Decodes:
    """``plan_rows`` and ``begins`` are the plan's. ``requests`` [2, R] are rows and, below, their lengths after the
    step, longest first: the device's last programs are then short ones, and none of its processors waits long for them.
    ``places``: where the plan's spans are in that order."""

    plan_rows: list[int]
    begins: list[int]
    requests: np.ndarray
    places: list[int]
    batch: SampleBatch

    @property
    def rows(self) -> np.ndarray:
        """[R]."""
        return self.requests[0]

    @property
    def ends(self) -> np.ndarray:
        """[R]."""
        return self.requests[1]

    @classmethod
    def of(cls, plan: StepPlan, state: Rows) -> Decodes:
        """Read a plan whose spans are decodes."""
        rows, ends = np.array(plan.rows, dtype=np.int64), np.array(plan.begins, dtype=np.int64) + 1
        assert len(set(plan.rows)) == len(rows) > 0, "a plan has at least one span and each row once"
        state.require(rows)
        order = np.argsort(-ends, kind="stable")
        places = np.argsort(order)
        requests = np.stack((rows[order], ends[order]))
        return cls(plan.rows, plan.begins, requests, list(map(int, places)), SampleBatch.of(*requests, state))

    def follow(self, plan: StepPlan, state: Rows) -> Decodes:
        """Read a plan behind this one. No row may have been started in between: it would have been computed by a step
        that is not of decodes."""
        if plan.rows != self.plan_rows or plan.begins != [begin + 1 for begin in self.begins]:
            return Decodes.of(plan, state)
        requests = self.requests.copy()
        requests[1] += 1
        return Decodes(plan.rows, plan.begins, requests, self.places, self.batch.advance())
