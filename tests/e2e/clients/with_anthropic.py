"""Anthropic's client: messages, streams, tools, counting."""

import sys

import anthropic

TOOL = {"name": "pick", "description": "Pick a number", "input_schema": {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"], "additionalProperties": False}}
GREEDY = {"temperature": 0}  # newer versions of the client have no field for it
HELLO = [{"role": "user", "content": "Say hello."}]


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.messages.create(model=model, max_tokens=8, messages=HELLO, extra_body=GREEDY)
    with client.messages.stream(model=model, max_tokens=8, messages=HELLO, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    assert client.messages.count_tokens(model=model, messages=HELLO).input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    called = client.messages.create(model=model, max_tokens=60, messages=HELLO, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert called.stop_reason == "tool_use", called
    assert 1 <= called.content[-1].input["n"] <= 9, called


if __name__ == "__main__":
    main(sys.argv[1])
