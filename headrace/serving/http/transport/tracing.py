"""`Tracing`: OpenTelemetry spans: one per request, with child spans for queue, prefill and decode of each prompt.

OpenTelemetry is imported only when tracing is configured. Refuses: texts; spans carry names, counts and times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from headrace.base import VERSION
from headrace.base.errors import ConfigError
from headrace.base.server_config import OperationsConfig
from headrace.serving.http.transport.errors import method_of, path_of, route_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from headrace.serving.http.transport.metrics import RequestTimer

TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 3

MAX_PROMPTS = 16
"""Prompts per request that get child spans."""
UNTRACED = frozenset({"/health", "/ready", "/metrics"})
NS = 1_000_000_000


class Tracing:
    """Passes finished spans to ``processor``. Sampling: a request with a ``traceparent`` header follows the decision
    in it; of the others the fraction ``share`` is sampled."""

    def __init__(self, processor: SpanProcessor, share: float):
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({SERVICE_NAME: "headrace", SERVICE_VERSION: VERSION})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace", VERSION)
        self._extract = TraceContextTextMapPropagator().extract

    def begin(self, scope: Scope, routes: frozenset[str]) -> Span | None:
        """The span of one HTTP request, a child of the span in its headers, if any; None for `UNTRACED` ones. It is
        ``state["span"]``, too."""
        from opentelemetry.trace import SpanKind

        if path_of(scope) in UNTRACED:
            return None
        headers, method, route = Headers(scope=scope), method_of(scope), route_of(path_of(scope), routes)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        attributes = {"http.request.method": method, "http.route": route}
        span = scope["state"]["span"] = self._tracer.start_span(
            f"{method} {route}", context=self._extract(carrier), kind=SpanKind.SERVER, attributes=attributes
        )
        return span

    def end(self, span: Span, status: int) -> None:
        """End the span of a completed request."""
        from opentelemetry.trace import StatusCode

        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def add_generation(self, span: Span, request_id: str, model: str, timers: list[RequestTimer]) -> None:
        """Add names and counts to a request's span, and a child span for each stage of each prompt."""
        if not span.is_recording():
            return
        span.set_attributes({
            "gen_ai.request.id": request_id, "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": sum(t.prompt_len for t in timers),
            "gen_ai.usage.output_tokens": sum(t.output_len for t in timers),
            "gen_ai.response.finish_reasons": sorted({reason for t in timers for reason in t.finish_reasons}),
            "gen_ai.latency.time_in_queue": max((t.queued_s or 0.0 for t in timers), default=0.0),
            "gen_ai.latency.time_to_first_token": min(
                (t.first_token_s for t in timers if t.first_token_s), default=0.0
            ),
            "gen_ai.latency.e2e": max((t.end_s or t.elapsed_s for t in timers), default=0.0),
        })
        for index, timer in enumerate(timers[:MAX_PROMPTS]):
            self._add_stages(span, index, timer)

    def close(self) -> None:
        """Flush, for a few seconds at most."""
        self._provider.force_flush(EXPORT_TIMEOUT_S * 1000)
        self._provider.shutdown()

    def _add_stages(self, parent: Span, index: int, timer: RequestTimer) -> None:
        from opentelemetry.trace import set_span_in_context

        # Seconds since arrival. A request that was aborted may lack any of the three times.
        end = timer.end_s or timer.elapsed_s
        queued = end if timer.queued_s is None else min(timer.queued_s, end)
        first = timer.first_token_s or end
        context = set_span_in_context(parent)
        for name, begin, until in (("queue", 0.0, queued), ("prefill", queued, first), ("decode", first, end)):
            # A stage that was not reached has length 0.
            if until > begin:
                span = self._tracer.start_span(
                    # nanoseconds of wall-clock time, as OpenTelemetry expects
                    name, context=context, start_time=timer.arrival_ns + int(begin * NS),
                    attributes={"headrace.prompt_index": index},
                )
                span.end(timer.arrival_ns + int(until * NS))


def open_tracing(operations: OperationsConfig) -> Tracing | None:
    """Tracing to the configured collector, None if there is none; raises `ConfigError` for an invalid one."""
    endpoint = operations.otlp_endpoint
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_endpoint must be an address such as http://127.0.0.1:4318, got {endpoint!r}", param="otlp_endpoint"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry ({error}): pip install 'headrace[otel]'", param="otlp_endpoint"
        ) from error
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
    return Tracing(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)), operations.trace_sampling
    )
