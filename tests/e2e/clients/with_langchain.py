"""langchain-openai: invoke, stream, bound tools, structured output by tool, by schema and by any JSON, batches; over
chat and over responses."""

import json
import re
import sys
import urllib.request

from langchain_openai import ChatOpenAI, custom_tool
from pydantic import BaseModel, ConfigDict, Field

SUM = 'start: INT (" + " INT)+\n%import common.INT'


@custom_tool(format={"type": "grammar", "syntax": "lark", "definition": SUM})
def add(code: str) -> str:
    """Adds numbers, such as 1 + 2."""
    return str(sum(map(int, code.split(" + "))))


def try_custom_tools(model: ChatOpenAI) -> None:
    """Their input is text, here of a grammar; the result goes back."""
    bound = model.bind_tools([add], tool_choice={"type": "custom", "name": "add"})
    whole, streamed = bound.invoke("3 + 4?"), None
    for piece in bound.stream("3 + 4?"):
        streamed = piece if streamed is None else streamed + piece
    for message in (whole, streamed):
        (text,) = message.tool_calls[0]["args"].values()
        assert message.response_metadata["status"] == "incomplete" or re.fullmatch(r"\d+( \+ \d+)+", text), text
    (text,) = whole.tool_calls[0]["args"].values()
    if re.fullmatch(r"\d+( \+ \d+)+", text):
        assert model.bind_tools([add]).invoke(["3 + 4?", whole, add.invoke(whole.tool_calls[0])]).content


class Pick(BaseModel):
    """Pick a number."""

    model_config = ConfigDict(extra="forbid")
    n: int = Field(ge=1, le=9)


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    model = ChatOpenAI(model=name, base_url=url + "/v1", api_key="none", temperature=0, max_tokens=200, max_retries=0)
    whole = model.invoke("Say hello.", max_tokens=8)
    assert whole.usage_metadata["output_tokens"] <= 8
    pieces = list(model.stream("Say hello.", max_tokens=8))
    assert "".join(p.content for p in pieces) == whole.content
    called = model.bind_tools([Pick], tool_choice="any").invoke("Pick one.")
    assert called.tool_calls[0]["name"] == "Pick" and 1 <= called.tool_calls[0]["args"]["n"] <= 9
    for each in (
        model,
        ChatOpenAI(
            model=name, base_url=url + "/v1", api_key="none", temperature=0, max_tokens=200, max_retries=0,
            use_responses_api=True
        )
    ):
        for method in ("function_calling", "json_schema"):
            assert 1 <= each.with_structured_output(Pick, method=method).invoke("Pick one.").n <= 9
        told = each.with_structured_output(None, method="json_mode").invoke(
            'Answer in JSON with the field n, such as {"n": 3}. Pick a number.'
        )
        assert isinstance(told, dict)
        tool = None
        for piece in each.bind_tools([Pick], tool_choice="required", parallel_tool_calls=False).stream("Pick one."):
            tool = piece if tool is None else tool + piece
        assert 1 <= tool.tool_calls[0]["args"]["n"] <= 9
    try_custom_tools(each)
    assert len(model.batch(["One.", "Two."], config={"max_concurrency": 2})) == 2


if __name__ == "__main__":
    main(sys.argv[1])
