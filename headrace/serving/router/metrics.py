"""`RouterMetrics`: what the router's ``/metrics`` reports; documented in ``docs/router.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.serving.http.transport.metrics import LATENCY_S, HttpMetrics, LoopHistogram
from headrace.serving.router.fleet import Fleet


class _FleetCollector(Collector):
    def __init__(self, fleets: Sequence[Fleet]):
        self._fleets = fleets

    def collect(self) -> Iterable[Metric]:
        gauges = {
            "up": "1 when the worker takes requests.",
            "requests_active": "Requests that run on the worker.",
            "load_tokens": "Tokens, roughly, of the requests that run on the worker.",
        }
        families = {
            name: GaugeMetricFamily(f"headrace_router_worker_{name}", doc, labels=("worker",))
            for name, doc in gauges.items()
        }
        for worker in (worker for fleet in self._fleets for worker in fleet):
            values = {
                "up": float(worker.takes_requests), "requests_active": len(worker.relays), "load_tokens": worker.load
            }
            for name, value in values.items():
                families[name].add_metric((worker.url,), value)
        yield from families.values()


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self, fleets: Sequence[Fleet]):
        self.registry = CollectorRegistry()
        self.registry.register(_FleetCollector(fleets))
        self.http = HttpMetrics(self.registry)
        self.requests = Counter(
            "headrace_router_requests", "Requests sent to workers, by the status that came back; lost: no response.",
            ("worker", "status"), registry=self.registry
        )
        self._counts: dict[tuple[str, str], Counter] = {}  # by labels
        self.retries = Counter(
            "headrace_router_retries", "Requests given to another worker.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "headrace_router_prompt_tokens", "Prompt tokens, roughly.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "headrace_router_cached_tokens", "Prompt tokens, roughly, that the chosen worker should have in its cache.",
            registry=self.registry
        )
        self.first_byte = LoopHistogram(
            "headrace_router_first_byte_seconds", "From a request's arrival to the head of its response.", LATENCY_S
        )
        self.registry.register(self.first_byte)

    def count(self, worker: str, status: str) -> None:
        """A request to a worker has ended."""
        count = self._counts.get((worker, status))
        if count is None:
            count = self._counts[worker, status] = self.requests.labels(worker, status)
        count.inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
