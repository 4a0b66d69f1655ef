"""Rules of security that no other test shows; docs/security.md tells which test shows which rule."""

from __future__ import annotations

import hmac

import pytest
from fake_apps import http_for
from fake_client import FakeClient

from headrace.base.errors import EngineUnavailable, RequestError, StepFailed
from headrace.base.messages import ErrorInfo
from headrace.serving.http.transport.errors import conceal

FAULT = (
    r'RuntimeError: CUDA error at /opt/conda/lib/torch/x.cpp:55, tensor at 0x7f3a2b4c, C:\models\secret.bin; see '
    r'"/var/lib/headrace"'
)


async def test_keys_are_compared_in_constant_time(client, monkeypatch: pytest.MonkeyPatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
    async with http_for(client, api_key="k" * 20, admin_api_key="a" * 20, host="0.0.0.0") as http:
        for path in ("/v1/models", "/flush_cache"):
            for key in ("k", "k" * 19 + "x", ""):
                compared.clear()
                assert (await http.get(path, headers={"Authorization": f"Bearer {key}"})).status_code == 401
                assert key.encode() in compared


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/../../etc/passwd", "/v1/models/../../../etc/passwd", "/v1/responses/%2e%2e%2fetc%2fpasswd",
        "/static/../../x", "/..%5c..%5cwin.ini"
    ]
)
async def test_paths_lead_to_routes_and_nowhere_else(client, path: str):
    async with http_for(client, responses_store=1) as http:
        answer = await http.get("http://server" + path)
        assert answer.status_code == 404 and "root:" not in answer.text


@pytest.mark.parametrize("fields", [
    {"chat_template": "{{ 7 * 7 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
    {"chat_template_kwargs": {"template": "x"}},
    {"chat_template_kwargs": {"self": 1}}, {"chat_template_kwargs": {"tokenizer": 1}},
    {"custom_logit_processor": "gASV"},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}]}
        ]
    },
    {"mm_processor_kwargs": {"x": 1}}, {"lora_path": "/etc"},
], ids=lambda f: str(f)[:60])  # fmt: skip
async def test_no_code_templates_files_or_addresses_come_with_a_request(client: FakeClient, fields: dict):
    async with http_for(client) as http:
        answer = await http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}
        )
        assert answer.status_code == 400 and not client.submitted


def test_what_a_library_says_of_a_fault_loses_paths_and_addresses():
    message = conceal(StepFailed(FAULT)).message
    assert message == 'RuntimeError: CUDA error at ...:55, tensor at ..., ...; see "..."'
    wrong = "use /v1/completions, or /v1/chat/completions"
    assert conceal(RequestError(wrong)).message == wrong, "what a client did wrong is told in full"
    assert "5 s" in conceal(EngineUnavailable("try again in 5 s")).message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/generate", "/generate"]
)
async def test_no_dialect_tells_paths(client: FakeClient, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool):
    monkeypatch.setattr("fake_client.ErrorInfo", lambda kind, *_: ErrorInfo(kind, FAULT))
    bodies = {
        "/v1/completions": {"prompt": "BREAK1"}, "/v1/responses": {"input": "BREAK1"},
        "/api/generate": {"prompt": "BREAK1", "model": "fake-model"}, "/generate": {"text": "BREAK1"}
    }
    body = bodies.get(path, {"messages": [{"role": "user", "content": "BREAK1"}], "max_tokens": 5})
    async with http_for(client) as http:
        answer = await http.post(path, json={**body, "stream": stream})
        assert "CUDA error" in answer.text and not any(
            word in answer.text for word in ("/opt", "0x7f", "secret", "/var")
        )
