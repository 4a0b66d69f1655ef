"""instructor: a pydantic model out of a chat, by tools, by JSON schema and by JSON mode."""

import json
import sys
import urllib.request
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Shirt(BaseModel):
    """A shirt."""

    model_config = ConfigDict(extra="forbid")  # else a small model may go on adding properties
    size: Literal["S", "M", "L"]
    count: int = Field(ge=1, le=9)


def main(url: str) -> None:
    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=mode)
        shirt = client.chat.completions.create(
            model=name, response_model=Shirt, max_tokens=80, max_retries=0,
            messages=[{"role": "user", "content": "Two medium shirts."}],
        )
        assert shirt.size in "SML" and 1 <= shirt.count <= 9


if __name__ == "__main__":
    main(sys.argv[1])
