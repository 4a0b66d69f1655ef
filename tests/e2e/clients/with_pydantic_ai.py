"""pydantic-ai over OpenAI's chat and responses and Anthropic's messages: text, streams, typed output by tool and by
schema."""

import asyncio
import json
import sys
import urllib.request

import anthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Pick(BaseModel):
    """A number."""

    n: int = Field(ge=1, le=9)


async def try_model(model, outputs) -> None:
    limit = {"max_tokens": 200}
    assert (await Agent(model).run("Say hello.", model_settings={"max_tokens": 12})).usage.output_tokens <= 12
    async with Agent(model).run_stream("Say hello.", model_settings={"max_tokens": 12}) as streamed:
        assert "".join([piece async for piece in streamed.stream_text(delta=True)])
    for output in outputs:
        agent = Agent(model, output_type=output)
        assert 1 <= (await agent.run("Pick a number.", model_settings=limit)).output.n <= 9
        async with agent.run_stream("Pick a number.", model_settings=limit) as streamed:
            assert 1 <= (await streamed.get_output()).n <= 9


async def run(url: str, name: str) -> None:
    openai = OpenAIProvider(base_url=url + "/v1", api_key="none")
    claude = AnthropicProvider(anthropic_client=anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0))
    for model in (OpenAIChatModel(name, provider=openai), OpenAIResponsesModel(name, provider=openai)):
        await try_model(model, (ToolOutput(Pick), NativeOutput(Pick)))
    # it takes schemas of Anthropic's own models alone
    await try_model(AnthropicModel(name, provider=claude), (ToolOutput(Pick),))


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        asyncio.run(run(url, json.load(answer)["data"][0]["id"]))


if __name__ == "__main__":
    main(sys.argv[1])
