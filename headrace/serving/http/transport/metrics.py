"""`Metrics`: everything that ``/metrics`` reports, in its own registry; documented in ``docs/metrics.md``.

Engine counters come from its statistics; latencies and statuses are measured here.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.base.messages import EngineStats
from headrace.service.client.outputs import ChoiceDelta, ReplicaStatus

# upper bounds of histogram buckets: seconds, and tokens
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)

Names = Mapping[str, tuple[str, str]]
"""Name and doc of a metric by the field of the statistics that it shows."""

GAUGES = {
    "num_running": ("num_requests_running", "Requests being computed."),
    "num_queued": ("num_requests_waiting", "Requests waiting for their first step."),
    "num_pages": ("kv_pages", "KV pages of all cache groups."),
    "num_used_pages": ("kv_used_pages", "KV pages that running requests hold, prefixes they share included."),
    "num_evictable_pages": (
        "kv_evictable_pages", "KV pages that only the prefix cache holds; evicted when others need them."
    ),
}

COUNTERS = {
    "prompt_tokens_total": (
        "prompt_tokens", "Prompt tokens of admitted requests; also the prefix cache's queries."
    ),
    "cached_tokens_total": ("prefix_cache_hit_tokens", "Prompt tokens that came from the prefix cache."),
    "computed_tokens_total": ("computed_tokens", "Tokens run through the model: prompts and outputs."),
    "generation_tokens_total": ("generation_tokens", "Output tokens."),
    "requests_total": ("engine_requests", "Requests submitted to the engine; n choices count n times."),
    "aborted_total": ("aborted_requests", "Requests ended before they finished."),
    "retracted_total": ("retracted_requests", "Times a running request released its pages and was queued again."),
    "failed_steps_total": ("failed_steps", "Steps that raised an error."),
    "steps_total": ("engine_steps", "Steps computed."),
    "late_kernels_total": ("late_kernels", "Kernels compiled while a step waited; 0 where the start found all."),
    "kernel_fallbacks_total": (
        "kernel_fallbacks", "Kernels that could not be compiled or loaded, in whose place slower ones run."
    ),
    "evicted_pages_total": ("evicted_pages", "Cached pages evicted for other requests."),
}

SPECULATION_COUNTERS = {
    "num_drafts": ("num_drafts", "Times a request had drafts to verify in a step."),
    "num_draft_tokens": ("num_draft_tokens", "Tokens of these drafts."),
    "num_accepted_tokens": ("num_accepted_tokens", "Draft tokens that were right."),
}

TIER_GAUGES = {
    "num_pages": ("pages", "Pages that it has room for, of all cache groups."),
    "num_used_pages": ("used_pages", "Pages that it holds."),
}

TIER_COUNTERS = {
    "written_pages_total": ("written_pages", "Pages written to it."),
    "read_pages_total": ("read_pages", "Pages read back from it."),
    "evicted_pages_total": ("evicted_pages", "Pages that gave way to others there."),
    "failed_pages_total": ("failed_pages", "Pages whose copy to or from it failed; they are computed again."),
    "hit_tokens_total": ("hit_tokens", "Prompt tokens that came from it."),
    "late_total": ("late_requests", "Requests that computed because copies from it took too long."),
}

STORAGE_COUNTERS = {name: about for name, about in TIER_COUNTERS.items() if name != "evicted_pages_total"}
"""Metrics of tiers that storage has too; it does not report what it holds."""

HOT_SLOT_COUNTERS = {
    "wanted_entries_total": ("wanted_entries", "KV entries in host memory that layers of decodes wanted."),
    "loaded_entries_total": ("loaded_entries", "Those that had to be copied to the device."),
}
TRANSFER_COUNTERS = {
    **{
        f"{what}_requests_total": (f"{what}_requests", f"Requests whose pages were {what}, to or by another engine.")
        for what in ("sent", "received", "lost")
    },
    **{f"{what}_pages_total": (f"{what}_pages", f"KV pages {what}.") for what in ("sent", "received")},
}
EXPERT_GAUGES = {
    "balancedness": ("expert_balancedness", "Mean load of ranks with experts over the largest, when last looked at."),
}
EXPERT_COUNTERS = {"num_moved": ("experts_moved", "Experts that were moved to another place.")}

ADAPTER_GAUGES = {
    "num_loaded": ("adapters_loaded", "Adapters that requests may name."),
    "num_resident": ("pool_slots_used", "Adapters on the device."),
}
ADAPTER_COUNTERS = {
    "loads_total": ("loads", "Times an adapter was put on the device."),
    "evictions_total": ("evictions", "Times an adapter had to leave the device for another."),
}


class EngineCollector(Collector):
    """Engine statistics as metrics, summed and by replica. ``stats`` and ``replicas`` are the latest snapshot;
    `Metrics.render` sets them before each scrape. ``num_adapter_slots``: 0 where no adapters are served."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.num_adapter_slots = 0
        self.replicas: list[ReplicaStatus] = [ReplicaStatus(0, "starting", EngineStats())]

    def collect(self) -> Iterable[Metric]:
        stats, num_pages = self.stats, self.stats.num_pages or 1
        yield from _counts("", stats, GAUGES, COUNTERS)
        yield _gauge(
            "kv_cache_usage_ratio", "Share of the KV pages that running requests hold.",
            stats.num_used_pages / num_pages
        )
        yield _gauge(
            "kv_cache_evictable_ratio", "Share of the KV pages that only the prefix cache holds.",
            stats.num_evictable_pages / num_pages
        )
        yield from _counts("spec_decode_", stats.speculation, {}, SPECULATION_COUNTERS)
        yield _by_label(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were right, by position in the draft.",
            "position", stats.speculation.num_accepted_tokens_per_position
        )
        yield _by_label(
            "expert_tokens", "Choices of experts that a rank has computed in the windows looked at.", "rank",
            stats.experts.tokens_by_rank
        )
        yield from _counts("", stats.experts, EXPERT_GAUGES, EXPERT_COUNTERS)
        yield from _counts("host_cache_", stats.tiers.host, TIER_GAUGES, TIER_COUNTERS, about="Host memory: ")
        yield from _counts(
            "storage_cache_", stats.tiers.storage, {}, STORAGE_COUNTERS, about="Disk and remote stores: "
        )
        yield from _counts("hot_slots_", stats.tiers.hot_slots, {}, HOT_SLOT_COUNTERS)
        yield from _counts("transfer_", stats.tiers.peers, {}, TRANSFER_COUNTERS)
        yield from self._collect_adapters()
        yield from self._collect_replicas()

    def _collect_replicas(self) -> Iterable[Metric]:
        """Names of their own: a series with a label beside the sum would be counted twice by ``sum()``."""
        up = GaugeMetricFamily(
            "headrace_replica_up", "1 when the replica takes requests, by replica.", labels=("engine",)
        )
        for replica in self.replicas:
            up.add_metric((str(replica.index),), replica.state == "ready")
        yield up
        for name, (metric, doc) in {**GAUGES, **COUNTERS}.items():
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            family = kind(
                f"headrace_replica_{metric}", f"{doc.removesuffix('.')}, by replica.", labels=("engine",)
            )
            for replica in self.replicas:
                family.add_metric((str(replica.index),), getattr(replica.stats, name))
            yield family

    def _collect_adapters(self) -> Iterable[Metric]:
        stats = self.stats.adapters
        yield from _counts("lora_", stats, ADAPTER_GAUGES, ADAPTER_COUNTERS)
        yield _gauge("lora_pool_slots", "Adapters that the device has room for.", self.num_adapter_slots)
        # as vLLM: names in labels, the time as value
        info = GaugeMetricFamily(
            "headrace_lora_requests_info", "Adapters with running and with waiting requests; the value is the time.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        )
        names = [",".join(sorted(counts)) for counts in (stats.running, stats.waiting)]
        info.add_metric((str(self.num_adapter_slots), *names), time.time())
        yield info
        by_adapter = GaugeMetricFamily(
            "headrace_lora_requests", "Requests of an adapter, running or waiting.", labels=("adapter", "state")
        )
        for state, counts in (("running", stats.running), ("waiting", stats.waiting)):
            for adapter, count in sorted(counts.items()):
                by_adapter.add_metric((adapter, state), count)
        yield by_adapter


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_{name}", doc, value=value)


def _counts(prefix: str, stats: object, gauges: Names, counters: Names, *, about: str = "") -> Iterator[Metric]:
    """Fields of ``stats`` as metrics, whose docs begin with ``about``."""
    for name, (metric, doc) in gauges.items():
        yield _gauge(prefix + metric, about + doc, getattr(stats, name))
    for name, (metric, doc) in counters.items():
        yield CounterMetricFamily(f"headrace_{prefix}{metric}", about + doc, value=getattr(stats, name))


def _by_label(name: str, doc: str, label: str, counts: Iterable[float]) -> Metric:
    """A counter for each index of ``counts``."""
    family = CounterMetricFamily(f"headrace_{name}", doc, labels=(label,))
    for index, count in enumerate(counts):
        family.add_metric((str(index),), count)
    return family


class LoopHistogram(Collector):
    """A histogram without lock and labels, for values observed per token. Not thread-safe: observe and collect in
    the same event loop."""

    def __init__(self, name: str, doc: str, buckets: tuple[float, ...]):
        self._name, self._doc, self._buckets = name, doc, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Observe one value."""
        # `bisect_left`: a value equal to a bound belongs into its bucket (Prometheus' ``le``).
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        # Prometheus' buckets are cumulative, hence `accumulate`.
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        yield HistogramMetricFamily(
            self._name, self._doc, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum
        )


class HttpMetrics:
    """What `RequestLedger` counts. ``num_active``: HTTP requests in progress, streams included."""

    def __init__(self, registry: CollectorRegistry):
        self.num_active = 0
        self._requests = Counter(
            "headrace_http_requests", "HTTP requests completed.", ("method", "route", "status"), registry=registry
        )
        self._counts: dict[tuple[str, str, int], Counter] = {}  # finding one by its labels takes 3 us
        active = Gauge(
            "headrace_http_requests_active", "HTTP requests in progress, streams included.", registry=registry
        )
        active.set_function(lambda: self.num_active)

    def count(self, method: str, route: str, status: int) -> None:
        """A request has ended."""
        key = (method, route, status)
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = self._requests.labels(method, route, str(status))
        count.inc()


class Metrics:
    """All metrics of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.finished = self._counter("requests_finished", "Choices that ended, by finish reason.", ("finish_reason",))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first output.", LATENCY_S
        )
        self.queue_time = self._histogram(
            "queue_time_seconds", "From a choice's arrival at the engine to its first step.", LATENCY_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of a choice, per token.", LATENCY_S
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of its last choice.", LATENCY_S
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length of a request.", TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Output length of a choice.", TOKENS)
        self.http = HttpMetrics(self.registry)
        self.ready = Gauge("headrace_ready", "1 when the server accepts requests.", registry=self.registry)

    def _counter(self, name: str, doc: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"headrace_{name}", doc, labels, registry=self.registry)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> LoopHistogram:
        made = LoopHistogram(f"headrace_{name}", doc, buckets)
        self.registry.register(made)
        return made

    def render(
        self, stats: EngineStats, replicas: list[ReplicaStatus], *, is_ready: bool, num_slots: int = 0
    ) -> bytes:
        """The metrics in Prometheus text format. ``num_slots``: of adapters on the device."""
        self.engine.stats, self.engine.replicas, self.engine.num_adapter_slots = stats, replicas, num_slots
        self.ready.set(is_ready)
        return generate_latest(self.registry)

    def names(self) -> Iterator[str]:
        """Every metric name."""
        for family in self.registry.collect():
            yield family.name + ("_total" if family.type == "counter" else "")


class RequestTimer:
    """Measures one engine request by its deltas. ``first_token_s`` and ``end_s``: seconds from arrival to the first
    token and to the end, 0 until then; ``queued_s``: seconds until the first choice's first step. ``arrival_ns`` is
    wall-clock time."""

    def __init__(self, metrics: Metrics, prompt_len: int, num_choices: int):
        self._metrics = metrics
        self._arrival = time.perf_counter()
        # both by choice index
        self._latest: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._num_running = num_choices
        self.prompt_len = prompt_len
        self.finish_reasons: list[str] = []
        self._queued: set[int] = set()
        self.arrival_ns = time.time_ns()
        self.first_token_s = self.end_s = 0.0
        self.queued_s: float | None = None
        metrics.prompt_tokens.observe(prompt_len)

    @property
    def output_len(self) -> int:
        """Tokens of all choices so far."""
        return sum(self._num_tokens.values())

    @property
    def elapsed_s(self) -> float:
        """Seconds since arrival."""
        return time.perf_counter() - self._arrival

    def observe(self, delta: ChoiceDelta) -> None:
        """Observe one delta."""
        now, index, num_tokens = time.perf_counter(), delta.index, len(delta.token_ids)
        if delta.queued_s is not None and index not in self._queued:
            self._queued.add(index)
            self.queued_s = delta.queued_s if self.queued_s is None else min(self.queued_s, delta.queued_s)
            self._metrics.queue_time.observe(delta.queued_s)
        if num_tokens:
            latest = self._latest.get(index)
            if latest is not None:
                # One observation per delta: the mean over its tokens, as a merged delta has several.
                self._metrics.inter_token.observe((now - latest) / num_tokens)
            elif not self._latest:  # the first token of any choice
                self.first_token_s = now - self._arrival
                self._metrics.first_token.observe(self.first_token_s)
            self._latest[index] = now
            self._num_tokens[index] = self._num_tokens.get(index, 0) + num_tokens
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            self._metrics.finished.labels(delta.finish_reason).inc()
            # pooling requests have no output tokens
            if delta.pooled is None:
                self._metrics.generation_tokens.observe(self._num_tokens.get(index, 0))
            self._num_running -= 1
            if not self._num_running:
                self.end_s = now - self._arrival
                self._metrics.end_to_end.observe(self.end_s)
