"""`Flight`: a plan on its way through the device, and whom it was made for."""

from __future__ import annotations

from headrace.base.step import StepPlan
from headrace.scheduling.request import Request


class Flight:
    """``requests[i]`` is the request of span i, and ``epochs[i]`` its epoch when planned: where the request's own has
    moved on since, the span's result is void."""

    __slots__ = ("epochs", "plan", "requests")

    def __init__(self, plan: StepPlan, requests: list[Request]):
        self.plan = plan
        self.requests = requests
        self.epochs = [request.epoch for request in requests]

    def live_requests(self) -> list[Request]:
        """Those that still are in the run this plan belongs to."""
        return [request for request, epoch in zip(self.requests, self.epochs, strict=True) if request.epoch == epoch]
