"""litellm as a gateway to an OpenAI-compatible server: chat, streams, text completion, tools and their results, usage;
and as one to Ollama's dialect."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch its price list

import litellm

TOOL = {"type": "function", "function": {"name": "pick", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": [
        "n"
    ], "additionalProperties": False}}}
HELLO = [{"role": "user", "content": "Say hello."}]


def main(url: str) -> None:
    import urllib.request

    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    options = {"model": "openai/" + name, "api_base": url + "/v1", "api_key": "none", "num_retries": 0}
    whole = litellm.completion(messages=HELLO, max_tokens=8, temperature=0, **options)
    assert whole.usage.completion_tokens <= 8 and whole.choices[0].finish_reason in ("stop", "length")
    pieces = litellm.completion(messages=HELLO, max_tokens=8, temperature=0, stream=True, **options)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    called = litellm.completion(messages=HELLO, max_tokens=60, tools=[TOOL], tool_choice="required", **options)
    assert 1 <= json.loads(called.choices[0].message.tool_calls[0].function.arguments)["n"] <= 9
    answered = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in called.choices[0].message.tool_calls
    ]
    for kept in (called.choices[0].message, called.choices[0].message.model_dump()):  # with litellm's own notes on it
        history = [*HELLO, kept, *answered]
        assert litellm.completion(messages=history, max_tokens=4, tools=[TOOL], **options).usage.completion_tokens <= 4
    asked = litellm.completion(
        messages=HELLO, max_tokens=4, **{**options, "model": "ollama_chat/" + name, "api_base": url}
    )
    assert asked.choices[0].message.content
    text = litellm.text_completion(
        prompt="Once upon", max_tokens=4, **{**options, "model": "text-completion-openai/" + name}
    )
    assert text.usage.completion_tokens <= 4


if __name__ == "__main__":
    main(sys.argv[1])
