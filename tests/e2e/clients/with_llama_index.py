"""llama-index's OpenAILike: completion and chat, whole and streamed, tools, structured prediction."""

import json
import sys
import urllib.request

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

HELLO = [ChatMessage(role="user", content="Say hello.")]


class Pick(BaseModel):
    """A number."""

    n: int = Field(ge=1, le=9)


def pick(n: int) -> str:
    """Pick a number."""
    return str(n)


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    options = {
        "model": name, "api_base": url + "/v1", "api_key": "none", "temperature": 0, "max_retries": 0,
        "context_window": 2048
    }
    whole = OpenAILike(max_tokens=8, is_chat_model=False, **options)
    assert whole.complete("Once upon").text == "".join(p.delta for p in whole.stream_complete("Once upon"))
    model = OpenAILike(max_tokens=100, is_chat_model=True, is_function_calling_model=True, **options)
    assert model.chat(HELLO).message.content == "".join(p.delta or "" for p in model.stream_chat(HELLO))
    tool = FunctionTool.from_defaults(pick)
    called = model.chat_with_tools([tool], "Pick one.", tool_required=True)
    assert model.get_tool_calls_from_response(called)[0].tool_name == "pick"
    *_, last = model.stream_chat_with_tools([tool], "Pick one.", tool_required=True)
    assert isinstance(model.get_tool_calls_from_response(last)[0].tool_kwargs["n"], int)
    by_schema = OpenAILike(
        max_tokens=100, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True,
        **options
    )
    for each in (model, by_schema):
        assert 1 <= each.structured_predict(Pick, PromptTemplate("Pick a number.")).n <= 9
    *_, last = by_schema.stream_structured_predict(Pick, PromptTemplate("Pick a number."))
    assert 1 <= last.n <= 9


if __name__ == "__main__":
    main(sys.argv[1])
