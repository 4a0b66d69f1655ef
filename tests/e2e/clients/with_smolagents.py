"""smolagents: its model whole and streamed, tools, an agent that calls them."""

import json
import sys
import urllib.request

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def pick(n: int) -> str:
    """Pick a number.

    Args:
        n: the number
    """
    return str(n)


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    model = OpenAIServerModel(model_id=name, api_base=url + "/v1", api_key="none", max_tokens=60, temperature=0)
    hello = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
    whole = model.generate(hello)
    assert (
        "".join(p.content or "" for p in model.generate_stream(hello)) == whole.content
        and whole.token_usage.output_tokens <= 60
    )
    called = model.generate(hello, tools_to_call_from=[pick])
    assert called.tool_calls[0].function.name == "pick"
    agent = ToolCallingAgent(tools=[pick], model=model, max_steps=1, verbosity_level=0)
    agent.run("Pick 3.")
    assert agent.memory.steps[1].token_usage.output_tokens <= 60


if __name__ == "__main__":
    main(sys.argv[1])
