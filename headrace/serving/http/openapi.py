"""The OpenAPI document, made from the endpoints and the record types, so that it always matches what is decoded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.json import schema_components
from starlette.requests import Request
from starlette.responses import Response

from headrace.base import VERSION
from headrace.base.server_config import ServerConfig
from headrace.serving.http.protocol.errors import form_of
from headrace.serving.http.reference import EXAMPLES, TAGS, describe_fields
from headrace.serving.http.transport.endpoint import Endpoint, Handler
from headrace.serving.http.transport.errors import EncodedResponse

ABOUT = (
    "OpenAI-compatible and native routes. Unknown fields are refused by name; null is the same as leaving a field out."
)
BODY_ERRORS = (400, 408, 413, 415)


def describe_api(
    endpoints: Sequence[Endpoint], *, root_path: str, has_key: bool, open_paths: frozenset[str]
) -> dict[str, Any]:
    """The document. ``open_paths`` need no key."""
    types: dict[Any, None] = {}
    for endpoint in endpoints:
        body = endpoint.body and endpoint.body.record
        candidates = (form_of(endpoint.path).record, body, endpoint.response, endpoint.event)
        types |= dict.fromkeys(t for t in candidates if t is not None)
    schemas, components = schema_components(list(types), ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    describe_fields(components, [schema_of[endpoint.body.record] for endpoint in endpoints if endpoint.body])
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        is_guarded = has_key and endpoint.path not in open_paths
        for method in endpoint.methods:
            operation = _describe_operation(endpoint, method, schema_of, is_guarded=is_guarded)
            # Starlette writes a parameter that may contain slashes as ``{name:path}``.
            paths.setdefault(endpoint.path.replace(":path}", "}"), {})[method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": VERSION, "description": ABOUT},
        "tags": [{"name": tag, "x-displayName": title, "description": about} for tag, (title, about) in TAGS.items()],
        "paths": paths,
        "components": {"schemas": components},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if has_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def document_handler(endpoints: Sequence[Endpoint], server: ServerConfig, open_paths: frozenset[str]) -> Handler:
    """The handler of the document, which is made on the first request."""
    document: list[bytes] = []

    async def show(_: Request) -> Response:
        if not document:
            described = describe_api(
                endpoints, root_path=server.root_path, has_key=server.api_key is not None, open_paths=open_paths
            )
            document.append(msgspec.json.encode(described))
        return EncodedResponse(document[0])

    return show


def _describe_operation(
    endpoint: Endpoint, method: str, schema_of: dict[Any, Any], *, is_guarded: bool
) -> dict[str, Any]:
    statuses = {500, *endpoint.errors, *(BODY_ERRORS if endpoint.body else ()), *((401,) if is_guarded else ())}
    error = {"application/json": {"schema": schema_of[form_of(endpoint.path).record]}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": _describe_response(endpoint, schema_of)}}
    responses |= {str(s): {"description": HTTPStatus(s).phrase, "content": error} for s in sorted(statuses)}
    name = re.sub(r"\W+", "_", endpoint.path).strip("_") or "root"
    operation: dict[str, Any] = {
        "summary": endpoint.summary, "tags": [endpoint.tag], "operationId": f"{name}_{method.lower()}",
        "responses": responses
    }
    parameters = [
        {"name": p, "in": "path", "required": True, "schema": {"type": "string"}}
        for p in re.findall(r"{(\w+)", endpoint.path)
    ] + [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in (endpoint.query or {}).items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {"schema": schema_of[endpoint.body.record]}
        if endpoint.path in EXAMPLES:
            content["example"] = EXAMPLES[endpoint.path]
        operation["requestBody"] = {"required": True, "content": {endpoint.body.media_type: content}}
    if is_guarded:
        operation["security"] = [{"key": []}]
    return operation


def _describe_response(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if endpoint.response is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    content = {"application/json": {"schema": schema_of[endpoint.response]}}
    if endpoint.event is not None:
        content[endpoint.event_media] = {"schema": {"type": "string"}, "x-event": schema_of[endpoint.event]}
    return content
