"""Texts as a trained model writes them, one for each kind of output of benchmarks/structured.py, which replace what
random weights would choose: bitmasks depend on the text, and tokens of all languages at equal odds are the hardest.
"""

from __future__ import annotations

import json
import random

FIRST = [
    "Alice", "Bob", "Carol", "Dmitri", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Katya", "Liam", "Mei",
    "Nadia", "Oscar", "Priya"
]
LAST = [
    "johnson", "smith", "garcia", "kim", "novak", "rossi", "silva", "tanaka", "weber", "young", "van der berg",
    "o hara", "ferreira", "lindqvist"
]
PROSE = (
    "the old harbour wakes before the sun and boats leave one by one while gulls argue over scraps on the quay a baker "
    "opens his window and "
    "warm bread fills the narrow street children run to school past shops that sell rope maps and second hand radios "
    "nobody hurries much"
)
TAGS = ["new", "old"]
NUM_RECORDS = 64


WORDS = PROSE.split()


def write_text(kind: str, seed: int) -> str:
    """A text of some 1,000 tokens or more for a name of ``structured.KINDS``; the seed chooses names, numbers and
    layout."""
    draw = random.Random(seed)
    records = [_write_record(draw) for _ in range(NUM_RECORDS)]
    if kind.startswith("JSON"):
        return json.dumps(records, indent=(None, 2)[seed % 2])
    if kind == "regular expression":
        return "".join(
            f"{word.capitalize()} " for word in draw.choices([word for word in WORDS if len(word) > 1], k=400)
        )
    if kind == "text with tool calls":
        call = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'
        return " ".join(_write_sentence(draw) + " " + call.format(json.dumps(record)) for record in records)
    return " ".join(_write_sentence(draw) for _ in range(4 * NUM_RECORDS))


def _write_record(draw: random.Random) -> dict[str, object]:
    return {
        "name": f"{draw.choice(FIRST)} {draw.choice(LAST)}", "age": draw.randint(1, 99),
        "tags": draw.choices(TAGS, k=draw.randint(0, 3))
    }


def _write_sentence(draw: random.Random) -> str:
    begin = draw.randrange(len(WORDS) - 12)
    return " ".join(WORDS[begin : begin + draw.randint(6, 12)]).capitalize() + "."
