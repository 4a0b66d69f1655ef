"""`Flight`: a plan on its way through the device, and whom it was made for."""

from __future__ import annotations

from headrace.base.step import StepPlan
from headrace.scheduling.request import Request

VOID = -1


class Flight:
    """``requests[i]`` is the request of span i, and ``epochs[i]`` its epoch when planned: where the request's own has
    moved on since, the span's result is void. ``computed`` are ``(request, epoch, end)`` of spans of which only the
    draw is."""

    __slots__ = ("computed", "epochs", "plan", "requests")

    def __init__(self, plan: StepPlan, requests: list[Request]):
        self.plan = plan
        self.requests = requests
        self.epochs = [request.epoch for request in requests]
        self.computed: list[tuple[Request, int, int]] = []

    def void_draw(self, request: Request) -> None:
        """The token that this step draws for the request is known by now; what it computes counts all the same."""
        for index, (other, epoch) in enumerate(zip(self.requests, self.epochs, strict=True)):
            if other is request and epoch == request.epoch:
                self.epochs[index] = VOID
                self.computed.append((request, epoch, self.plan.begins[index] + self.plan.lengths[index]))

    def live_requests(self) -> list[Request]:
        """Those that still are in the run this plan belongs to."""
        return [request for request, epoch in zip(self.requests, self.epochs, strict=True) if request.epoch == epoch]
