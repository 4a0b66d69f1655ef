"""outlines 1.x: its OpenAI and vLLM models over a server, typed outputs."""

import json
import sys
import urllib.request
from typing import Literal

import openai
import outlines
from pydantic import BaseModel, ConfigDict


class Shirt(BaseModel):
    """A shirt."""

    model_config = ConfigDict(extra="forbid")
    size: Literal["S", "M", "L"]


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    as_openai, as_vllm = outlines.from_openai(client, name), outlines.from_vllm(client, name)
    for model in (as_openai, as_vllm):
        assert Shirt.model_validate_json(model("A medium shirt, please.", Shirt, max_tokens=60)).size in "SML"
    assert as_vllm("Yes or no?", Literal["Yes", "No"], max_tokens=10) in ("Yes", "No")
    assert as_vllm("A year?", outlines.types.Regex("[0-9]{4}"), max_tokens=10).isdigit()


if __name__ == "__main__":
    main(sys.argv[1])
