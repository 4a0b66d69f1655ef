"""Requests that schemathesis makes up from the OpenAPI document, and checks of the answers. test_schema.py runs this
file in a process of its own: all workers of pytest-xdist would make them up to collect tests, for ten seconds each."""

from __future__ import annotations

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
from headrace.base.pooling import PoolingFacts
from headrace.serving.http.app import ENDPOINTS, create_app

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, negative_data_rejection]
MAX_STREAM_EVENTS = 20
"""Schemathesis reads no more of a stream."""

settled = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck)
)


def describe(client: FakeClient, **options: object) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(client, ServerConfig(**options)))


ALIASES = [e.path for number, e in enumerate(ENDPOINTS) if e.handler in [other.handler for other in ENDPOINTS[:number]]]
"""Further paths of a route, which the same function answers."""
SAME_BODIES = ["/apply-template", "/v1/responses/input_tokens"]
"""Whose bodies, the largest ones, are those of other routes, where each of their fields is tried by itself."""


def describe_generating() -> schemathesis.schemas.BaseSchema:
    return describe(FakeClient(max_len=128), max_batch_prompts=16, allowed_hosts="testserver")


generating = describe_generating().exclude(path=[*ALIASES, *SAME_BODIES])
at_random = describe_generating()
at_random.config.phases.update(phases=["examples", "fuzzing"])
at_random = at_random.include(path=SAME_BODIES)
pooling = describe(
    FakeClient(pooling=PoolingFacts("embed", 6, needs_all_tokens=True), max_len=128), max_batch_prompts=16
).include(path=["/v1/embeddings", "/v1/score", "/v1/rerank", "/encode", "/v1/classify"])


@generating.parametrize()
@settings(settled, max_examples=10)
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
    case.validate_response(response, checks=[*CHECKS, content_type_conformance, unsupported_method])


@at_random.parametrize()
@settings(settled, max_examples=30)
def test_answers_to_bodies_of_other_routes_conform(case):
    case.validate_response(case.call(), checks=[*CHECKS, content_type_conformance])


@pooling.parametrize()
@settings(settled, max_examples=5)
def test_pooled_answers_conform(case):
    case.validate_response(case.call(), checks=CHECKS)
