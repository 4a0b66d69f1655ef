"""Ollama's client: what is told of the model, chat and generate whole and streamed, tools, formats, logprobs."""

import sys

import ollama
from pydantic import BaseModel, ConfigDict

HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"num_predict": 8, "temperature": 0}


class Pick(BaseModel):
    """A number."""

    model_config = ConfigDict(extra="forbid")
    n: bool


def pick(n: int) -> str:
    """Pick a number.

    Args:
        n: the number
    """
    return str(n)


def main(url: str) -> None:
    client = ollama.Client(host=url)
    name = client.list().models[0].model
    assert client.ps().models[0].model == name and "completion" in client.show(name).capabilities
    whole = client.chat(model=name, messages=HELLO, options=GREEDY)
    assert "".join(
        p.message.content for p in client.chat(model=name, messages=HELLO, options=GREEDY, stream=True)
    ) == whole.message.content
    told = client.chat(model=name, messages=HELLO, options=GREEDY, logprobs=True, top_logprobs=2)
    assert "".join(entry.token for entry in told.logprobs) == told.message.content == whole.message.content
    Pick.model_validate_json(
        client.chat(
            model=name, messages=HELLO, options={"num_predict": 60}, format=Pick.model_json_schema()
        ).message.content
    )
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "pick", "arguments": {"n": 1}}}]},
        {"role": "tool", "tool_name": "pick", "content": "1"}
    ]
    assert client.chat(model=name, messages=[*HELLO, *calls], tools=[pick], options=GREEDY).eval_count <= 8
    asked = client.generate(model=name, prompt="Once upon", options=GREEDY)
    assert "".join(
        p.response for p in client.generate(model=name, prompt="Once upon", options=GREEDY, stream=True)
    ) == asked.response


if __name__ == "__main__":
    main(sys.argv[1])
