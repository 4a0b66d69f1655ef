"""OpenAI's client: chat, streams, tools, structured output, logprobs, responses by id, embeddings refused by name."""

import json
import sys

import openai

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "pick", "description": "Pick a number", "parameters": SCHEMA, "strict": True}}
HELLO = [{"role": "user", "content": "Say hello."}]


def main(url: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content) <= 8
    stream = client.chat.completions.create(model=model, messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    called = client.chat.completions.create(model=model, messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=60)
    assert 1 <= json.loads(called.choices[0].message.tool_calls[0].function.arguments)["n"] <= 9
    formatted = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=40, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    )
    assert 1 <= json.loads(formatted.choices[0].message.content)["n"] <= 9
    first = client.responses.create(model=model, input="Say hello.", max_output_tokens=8)
    second = client.responses.create(model=model, input="Again.", max_output_tokens=8, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens and client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)


if __name__ == "__main__":
    main(sys.argv[1])
