"""The OpenAPI document against the application: schemathesis makes up requests and checks the answers."""

from __future__ import annotations

import functools

import pytest
import schemathesis
from fake_client import FakeClient
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from headrace.base.config import ServerConfig
from headrace.serving.http.app import ENDPOINTS, create_app

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection, unsupported_method
]
MAX_STREAM_EVENTS = 20
"""Schemathesis reads no more of a stream."""


@functools.cache
def application():
    return create_app(FakeClient(max_len=128), ServerConfig(max_batch_prompts=16, allowed_hosts="testserver"))


schema = schemathesis.openapi.from_asgi("/openapi.json", application())


@schema.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate],
          suppress_health_check=list(HealthCheck))
def test_answers_conform(case):
    response = case.call()
    if response.headers["content-type"][0].startswith("application/x-ndjson"):
        assert b'"done":true' in response.content.splitlines()[-1]
        return
    if response.headers["content-type"][0].startswith("text/event-stream"):
        last = {
            "/v1/messages": b"event: message_stop", "/v1/responses": b"event: response.incomplete"
        }.get(case.path, b"data: [DONE]")
        events = response.content.rstrip().split(b"\n\n")
        assert len(events) == MAX_STREAM_EVENTS or events[-1].startswith(last)
        return
    case.validate_response(response, checks=CHECKS)


def test_every_route_is_described():
    paths = schema.raw_schema["paths"]
    assert {p.replace(":path}", "}") for p in (e.path for e in ENDPOINTS)} == set(paths)
    fields = schema.raw_schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["top_p"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}
    assert schema.raw_schema["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "GenerateRequest"])
def test_documented_fields_are_decoded_ones(name):
    properties = schema.raw_schema["components"]["schemas"][name]["properties"]
    records = {e.body.record.__name__: e.body.record for e in ENDPOINTS if e.body}
    assert set(properties) == set(records[name].__struct_fields__)
