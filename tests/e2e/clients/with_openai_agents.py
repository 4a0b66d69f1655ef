"""OpenAI's agents: both of its models, typed output, tools whole and streamed, a handover to another agent."""

import asyncio
import json
import sys
import urllib.request
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)
FORCED = ModelSettings(max_tokens=60, tool_choice="required", parallel_tool_calls=False)


class Answer(BaseModel):
    """An answer."""

    size: Literal["S", "M", "L"]


@function_tool
def pick(n: Literal[1, 2, 3]) -> str:
    """Pick a number."""
    return f"picked {n}"


async def try_model(model) -> None:
    typed = await Runner.run(
        Agent(name="a", model=model, output_type=Answer, model_settings=ModelSettings(max_tokens=60)),
        "A shirt, please."
    )
    assert typed.final_output.size in "SML"
    picker = Agent(name="a", model=model, tools=[pick], model_settings=FORCED, tool_use_behavior="stop_on_first_tool")
    called = await Runner.run(picker, "Pick one.", max_turns=2)
    assert called.final_output in ("picked 1", "picked 2", "picked 3")
    streamed = Runner.run_streamed(picker, "Pick one.", max_turns=2)
    kinds = {event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"}
    assert (
        {"response.function_call_arguments.delta", "response.completed"} <= kinds
        and streamed.final_output.startswith("picked")
    )
    other = Agent(name="b", model=model, output_type=Answer, model_settings=ModelSettings(max_tokens=60))
    handed = await Runner.run(
        Agent(name="a", model=model, handoffs=[other], model_settings=FORCED), "A shirt, please.", max_turns=3
    )
    assert handed.last_agent is other and handed.final_output.size in "SML"


async def run(url: str, name: str) -> None:
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        await try_model(kind(model=name, openai_client=client))


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        asyncio.run(run(url, json.load(answer)["data"][0]["id"]))


if __name__ == "__main__":
    main(sys.argv[1])
