"""Spans of requests, as OpenTelemetry's own SDK gathers them; then over the wire, as a collector gets them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from fake_apps import http_for
from fake_client import FakeClient

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: F401
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.base.errors import ConfigError
from headrace.base.server_config import OperationsConfig
from headrace.serving.http.generation import context
from headrace.serving.http.transport.metrics import Metrics, RequestTimer
from headrace.serving.http.transport.tracing import Tracing, open_tracing

NOBODY = OperationsConfig(otlp_endpoint="http://127.0.0.1:9")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """An application whose spans stay here."""

    def __init__(self, http, client: FakeClient, exporter: InMemorySpanExporter):
        self.http, self.client, self._exporter = http, client, exporter

    def spans(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in self._exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
async def traced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Traced]:
    client, exporter = FakeClient(delay_s=0.005), InMemorySpanExporter()
    monkeypatch.setattr(context, "open_tracing", lambda _: Tracing(SimpleSpanProcessor(exporter), 1.0))
    async with http_for(client, operations=NOBODY) as http:
        yield Traced(http, client, exporter)


async def test_a_request_has_a_span_for_each_stage(traced: Traced):
    answer = await traced.http.post(
        "/v1/completions", json={"prompt": "secret words", "max_tokens": 4},
        headers={"X-Request-Id": "me", "Authorization": "Bearer hush"}
    )
    assert answer.status_code == 200
    spans = traced.spans()
    assert {name: len(found) for name, found in spans.items()} == {
        "POST /v1/completions": 1, "queue": 1, "prefill": 1, "decode": 1
    }
    (root,), (queue,), (prefill,), (decode,) = (
        spans[name] for name in ("POST /v1/completions", "queue", "prefill", "decode")
    )
    assert (
        root.kind == SpanKind.SERVER and root.parent is None and root.resource.attributes["service.name"] == "headrace"
    )
    for stage in (queue, prefill, decode):
        assert stage.parent.span_id == root.context.span_id and stage.context.trace_id == root.context.trace_id
    assert (
        root.start_time <= queue.start_time < queue.end_time == prefill.start_time < prefill.end_time
        == decode.start_time < decode.end_time <= root.end_time
    )
    assert queue.end_time - queue.start_time == pytest.approx(2_000_000, abs=2), "as the engine told"
    told = dict(root.attributes)
    assert (
        told["http.response.status_code"], told["http.route"], told["gen_ai.request.id"]
    ) == (200, "/v1/completions", "cmpl-me")
    assert (
        told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"], told["gen_ai.response.finish_reasons"]
    ) == (13, 4, ("length",))
    assert (
        0 < told["gen_ai.latency.time_in_queue"] < told["gen_ai.latency.time_to_first_token"]
        < told["gen_ai.latency.e2e"]
    )
    assert "secret" not in str(
        [span.to_json() for found in spans.values() for span in found]
    ) and "hush" not in str(told)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/generate"])
async def test_streams_batches_and_other_routes(traced: Traced, path: str):
    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "model": "fake-model", "stream": True}
    body = (
        {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 3, "n": 2}} if path == "/generate" else messages
    )
    assert (await traced.http.post(path, json=body)).status_code == 200
    spans = traced.spans()
    num_prompts = 3 if path == "/generate" else 1
    assert {name: len(found) for name, found in spans.items()} == {
        f"POST {path}": 1, "queue": num_prompts, "prefill": num_prompts, "decode": num_prompts
    }
    assert spans[f"POST {path}"][0].attributes["gen_ai.usage.output_tokens"] == (18 if path == "/generate" else 3)
    assert {span.attributes["headrace.prompt_index"] for span in spans["decode"]} == set(range(num_prompts))


async def test_a_callers_trace_goes_on(traced: Traced):
    body = {"prompt": "x", "max_tokens": 2}
    await traced.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    (root,) = traced.spans()["POST /v1/completions"]
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == SPAN
    await traced.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert len(traced.spans()["POST /v1/completions"]) == 1, "the caller said that it is not sampled"
    await traced.http.post("/v1/completions", json=body, headers={"traceparent": "nonsense\x7f"})
    assert len(traced.spans()["POST /v1/completions"]) == 2


async def test_errors_and_what_is_not_worth_a_span(traced: Traced):
    for path in ("/health", "/ready", "/metrics"):
        await traced.http.get(path)
    assert traced.spans() == {}
    await traced.http.post("/v1/completions", json={"prompt": "BREAK2"})
    await traced.http.post("/v1/completions", json={"prompt": "x", "n": 0})
    await traced.http.get("/no/such/path/" + "x" * 99)
    failed, wrong = traced.spans()["POST /v1/completions"]
    assert (
        failed.status.status_code == StatusCode.ERROR
        and failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    )
    assert wrong.status.status_code == StatusCode.UNSET and wrong.attributes["http.response.status_code"] == 400
    assert len(traced.spans()["GET unmatched"]) == 1


async def test_an_aborted_request_ends_its_spans(traced: Traced):
    asking = asyncio.create_task(
        traced.http.post("/v1/completions", json={"prompt": "HOLD"}, headers={"X-Request-Id": "me"})
    )
    while not traced.http.app.state.context.running:
        await asyncio.sleep(0.01)
    await traced.http.post("/abort_request", json={"rid": "me"})
    await asking
    spans = traced.spans()
    assert set(spans) == {"POST /v1/completions", "POST /abort_request", "queue", "prefill"}, "nothing was decoded"
    assert spans["POST /v1/completions"][0].attributes["gen_ai.response.finish_reasons"] == ("abort",)


def scope_of(method: str, path: str) -> dict:
    """Of a request without headers."""
    return {"type": "http", "method": method, "path": path, "headers": [], "state": {}}


def test_a_share_of_requests_is_traced():
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), 0.25)
    for _ in range(400):
        span = tracing.begin(scope_of("GET", "/x"), frozenset({"/x"}))
        tracing.add_generation(span, "id", "model", [RequestTimer(Metrics(), 1, 1)] if span.is_recording() else [])
        tracing.end(span, 200)
    assert 50 < len([s for s in exporter.get_finished_spans() if s.name == "GET /x"]) < 160
    tracing.close()


def test_a_collector_gets_the_spans():
    """Over HTTP, as OTLP's own message."""
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = open_tracing(OperationsConfig(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/"))
        tracing.end(tracing.begin(scope_of("POST", "/generate"), frozenset({"/generate"})), 200)
        tracing.close()
        collector.shutdown()
    ((path, message),) = received
    (span,) = message.resource_spans[0].scope_spans[0].spans
    assert (path, span.name) == ("/v1/traces", "POST /generate")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://x:1", "http://", ""])
def test_addresses_that_are_none(endpoint: str):
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        open_tracing(OperationsConfig(otlp_endpoint=endpoint))


def test_without_the_extra_it_says_what_to_install_and_nothing_is_imported():
    code = """
import sys
import headrace.serving.http.app
assert not [m for m in sys.modules if m.startswith("opentelemetry.sdk") or m.startswith("opentelemetry.exporter")]
from headrace.base.server_config import OperationsConfig
from headrace.serving.http.transport.tracing import open_tracing
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = None
try:
    open_tracing(OperationsConfig(otlp_endpoint="http://127.0.0.1:4318"))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.startswith("ConfigError") and "pip install 'headrace[otel]'" in done.stdout, done.stderr
