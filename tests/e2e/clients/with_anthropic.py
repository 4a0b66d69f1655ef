"""Anthropic's client: messages, streams, tools, counting; typed output, and tools that it runs by itself."""

import sys

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel

TOOL = {"name": "pick", "description": "Pick a number", "input_schema": {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": [
        "n"
    ], "additionalProperties": False}}
GREEDY = {"temperature": 0}  # newer versions of the client have no field for it
HELLO = [{"role": "user", "content": "Say hello."}]


class Answer(BaseModel):
    """An answer. The client leaves bounds of numbers out of schemas."""

    yes: bool


@beta_tool
def pick(number: bool) -> str:
    """Pick a number."""
    return f"picked {number}"


def try_beta(client: anthropic.Anthropic, model: str) -> None:
    """What the client does beyond a request: it parses, and calls tools until there are no more calls."""
    options = {"model": model, "max_tokens": 60, "messages": HELLO}
    for messages in (client.messages, client.beta.messages):
        assert isinstance(messages.parse(output_format=Answer, **options).parsed_output, Answer)
        with messages.stream(output_format=Answer, **options) as stream:
            assert isinstance(stream.get_final_message().parsed_output, Answer)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    turns = list(client.beta.messages.tool_runner(tools=[pick], max_iterations=2, tool_choice=choice, **options))
    assert [turn.content[-1].type for turn in turns] == ["tool_use", "tool_use"]
    (streamed,) = (
        turn.get_final_message()
        for turn in client.beta.messages.tool_runner(
            tools=[pick], max_iterations=1, tool_choice=choice, stream=True, **options
        )
    )
    assert streamed.content[-1].name == "pick"


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    # The prompt is in the cache then: where tiles compute it (AMX), the last bits are others.
    client.messages.create(model=model, max_tokens=1, messages=HELLO, extra_body=GREEDY)
    whole = client.messages.create(model=model, max_tokens=8, messages=HELLO, extra_body=GREEDY)
    with client.messages.stream(model=model, max_tokens=8, messages=HELLO, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    assert (
        client.messages.count_tokens(model=model, messages=HELLO).input_tokens
        == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )
    called = client.messages.create(
        model=model, max_tokens=60, messages=HELLO, tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert called.stop_reason == "tool_use", called
    assert 1 <= called.content[-1].input["n"] <= 9, called
    try_beta(client, model)


if __name__ == "__main__":
    main(sys.argv[1])
