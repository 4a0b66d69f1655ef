"""The format whose every message names its channel: analysis (reasoning), commentary (calls, preambles), final."""

from __future__ import annotations

import re

from headrace.service.parsing.format import Channels, Header

_HEADER = Header(
    end="<|message|>", call=re.compile(r"\bto=functions\.(?P<name>[\w.-]+)"), reasoning=re.compile(r"\banalysis\b")
)

# <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
# <|message|>{"a": 1}<|call|>; the prompt ends with <|start|>assistant
HARMONY = Channels(
    openings=(("<|channel|>", _HEADER), ("<|start|>", _HEADER)),
    ends=("<|end|>", "<|return|>", "<|call|>"),
    bare=(("to=functions.", _HEADER),),
)
