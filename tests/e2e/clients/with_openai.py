"""OpenAI's client: chat, streams, tools, structured output, logprobs, responses by id; what it parses by itself, whole
and streamed, in both dialects."""

import json
import re
import sys

import openai
from pydantic import BaseModel, ConfigDict

SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"],
    "additionalProperties": False
}
TOOL = {
    "type": "function",
    "function": {"name": "pick", "description": "Pick a number", "parameters": SCHEMA, "strict": True}
}
HELLO = [{"role": "user", "content": "Say hello."}]


class Answer(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")
    yes: bool


def try_parsing(client: openai.OpenAI, model: str) -> None:
    """Types by schema and by tool; streams put together by the client."""
    answer_tool = openai.pydantic_function_tool(Answer)
    called = {"tools": [answer_tool], "tool_choice": "required", "parallel_tool_calls": False}
    options = {"model": model, "messages": HELLO, "max_tokens": 60}
    assert isinstance(
        client.chat.completions.parse(response_format=Answer, **options).choices[0].message.parsed, Answer
    )
    assert isinstance(
        client.chat.completions.parse(**called, **options).choices[0].message.tool_calls[0].function.parsed_arguments,
        Answer
    )
    for asked in ({"response_format": Answer}, called):
        with client.chat.completions.stream(**asked, **options) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_completion().choices[0].message
        assert isinstance(
            message.parsed if asked is not called else message.tool_calls[0].function.parsed_arguments, Answer
        )
        assert ("tool_calls.function.arguments.done" in kinds) == (asked is called)
    options = {"model": model, "input": "Say hello.", "max_output_tokens": 60}
    called = {
        "tools": [{"type": "function", **answer_tool["function"]}], "tool_choice": "required",
        "parallel_tool_calls": False
    }
    assert isinstance(client.responses.parse(text_format=Answer, **options).output_parsed, Answer)
    assert Answer.model_validate_json(client.responses.parse(**called, **options).output[-1].arguments)
    for asked in ({"text_format": Answer}, called):
        with client.responses.stream(**asked, **options) as stream:
            kinds = {event.type for event in stream}
            response = stream.get_final_response()
        assert isinstance(
            response.output_parsed, Answer
        ) if asked is not called else Answer.model_validate_json(response.output[-1].arguments)
        assert ("response.function_call_arguments.done" in kinds) == (asked is called)
    told = client.responses.create(include=["message.output_text.logprobs"], top_logprobs=2, **options)
    assert "".join(entry.token for entry in told.output[-1].content[0].logprobs) == told.output_text
    assert client.responses.input_tokens.count(model=model, input="Say hello.").input_tokens == told.usage.input_tokens


def try_custom_tools(client: openai.OpenAI, model: str) -> None:
    """Their input is text, which a regular expression binds."""
    grammar = {"syntax": "regex", "definition": "SELECT [a-z]{3,9};"}
    tool = {"type": "custom", "name": "sql", "format": {"type": "grammar", **grammar}}
    choice = {"type": "custom", "name": "sql"}
    options = {"model": model, "input": "All users?", "tools": [tool], "tool_choice": choice, "max_output_tokens": 60}
    call = client.responses.create(**options).output[-1]
    with client.responses.stream(**options) as stream:
        pieces = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        streamed = stream.get_final_response().output[-1]
    assert "".join(pieces) == streamed.input
    nested = {"type": "custom", "custom": {"name": "sql", "format": {"type": "grammar", "grammar": grammar}}}
    message = client.chat.completions.create(
        model=model, messages=HELLO, tools=[nested], tool_choice={"type": "custom", "custom": {"name": "sql"}},
        max_tokens=60
    ).choices[0].message
    for text in (call.input, streamed.input, message.tool_calls[0].custom.input):
        assert re.fullmatch(grammar["definition"], text), text
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "none"}
    sent = [{"role": "user", "content": "All users?"}, call, result]
    assert client.responses.create(model=model, input=sent, tools=[tool], max_output_tokens=8).status


def main(url: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content) <= 8
    stream = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    called = client.chat.completions.create(
        model=model, messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=60
    )
    assert 1 <= json.loads(called.choices[0].message.tool_calls[0].function.arguments)["n"] <= 9
    formatted = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    )
    assert 1 <= json.loads(formatted.choices[0].message.content)["n"] <= 9
    first = client.responses.create(model=model, input="Say hello.", max_output_tokens=8)
    second = client.responses.create(model=model, input="Again.", max_output_tokens=8, previous_response_id=first.id)
    assert (
        second.usage.input_tokens > first.usage.input_tokens
        and client.responses.retrieve(second.id).output_text == second.output_text
    )
    client.responses.delete(first.id)
    try_parsing(client, model)
    try_custom_tools(client, model)


if __name__ == "__main__":
    main(sys.argv[1])
