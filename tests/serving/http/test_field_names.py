"""Errors of the engine's client, in the names of each API's fields."""

from __future__ import annotations

import pytest

CHAT, TEXT, RESPONSES, NATIVE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"
USER = {"role": "user", "content": "hi"}
LONG = 10**6


def native(**sampling: object) -> dict:
    return {"text": "hi", "sampling_params": sampling}


@pytest.mark.parametrize(("path", "body", "param", "words"), [
    (CHAT, {"messages": [USER], "max_tokens": LONG}, "max_tokens", "and max_tokens is 1000000"),
    (
        CHAT, {"messages": [USER], "max_completion_tokens": LONG}, "max_completion_tokens",
        "and max_completion_tokens is 1000000"
    ),
    (
        CHAT, {"messages": [USER], "max_completion_tokens": 2, "min_tokens": 3}, "min_tokens",
        "min_tokens must be at most max_completion_tokens (2), got 3"
    ),
    (TEXT, {"prompt": "hi", "max_tokens": LONG}, "max_tokens", "and max_tokens is 1000000"),
    (RESPONSES, {"input": "hi", "max_output_tokens": LONG}, "max_output_tokens", "and max_output_tokens is 1000000"),
    (RESPONSES, {"input": "x" * LONG}, "input", "tokens fit"),
    (
        NATIVE, native(max_new_tokens=LONG), "sampling_params.max_new_tokens",
        "and sampling_params.max_new_tokens is 1000000"
    ),
    (
        NATIVE, native(max_new_tokens=2, min_new_tokens=3), "sampling_params.min_new_tokens",
        "sampling_params.min_new_tokens must be at most sampling_params.max_new_tokens (2), got 3"
    ),
    (
        NATIVE, native(logit_bias={"99999": 1}), "sampling_params.logit_bias",
        "sampling_params.logit_bias holds token id 99999"
    ),
    (NATIVE, native(stop_token_ids=[99999]), "sampling_params.stop_token_ids", "sampling_params.stop_token_ids holds"),
    (NATIVE, {**native(), "return_logprob": True, "token_ids_logprob": [99999]}, "token_ids_logprob", "99999"),
    (NATIVE, {"input_ids": [99999]}, "input_ids", "vocabulary"), (NATIVE, {"text": "x" * LONG}, "text", "tokens fit"),
    (TEXT, {"prompt": [99999]}, "prompt", "vocabulary"),
])
async def test_errors_name_the_field_that_was_sent(http, client, path, body, param, words):
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
    assert "sampling_params.sampling_params" not in error["message"] and not client.submitted
