"""Reasoning formats, one value each."""

from __future__ import annotations

from typing import Any

from headrace.service.parsing.format import ReasoningFormat
from headrace.service.parsing.formats.channels import HARMONY

_THINK: dict[str, Any] = {"starts": ("<think>",), "ends": ("</think>",)}

# The first reasoning models leave the start out when the template does.
DEEPSEEK_R1 = ReasoningFormat(name="deepseek_r1", **_THINK, is_open=True, signs=(("<｜Assistant｜>", "</think>"),))
DEEPSEEK_V3 = ReasoningFormat(name="deepseek_v3", **_THINK, signs=(("<｜Assistant｜>", "</think>", "thinking"),))
DEEPSEEK_V4 = ReasoningFormat(name="deepseek_v4", **_THINK, signs=(("<｜Assistant｜>", "</think>", "DSML"),))
QWEN3 = ReasoningFormat(name="qwen3", **_THINK, signs=(("</think>",),))
GLM45 = ReasoningFormat(name="glm45", **_THINK, ends_at_calls=True, signs=(("</think>", "<arg_key>"),))
KIMI_K2 = ReasoningFormat(
    name="kimi_k2", **_THINK, ends_at_calls=True, signs=(("</think>", "<|tool_calls_section_begin|>"),)
)
KIMI = ReasoningFormat(name="kimi", starts=("◁think▷",), ends=("◁/think▷",), signs=(("◁think▷",),))
MISTRAL = ReasoningFormat(name="mistral", starts=("[THINK]",), ends=("[/THINK]",), signs=(("[THINK]", "[/THINK]"),))
GRANITE = ReasoningFormat(
    name="granite",
    starts=("Here is my thought process:", "Here's my thought process:"),
    ends=("Here is my response:", "Here's my response:"),
    signs=(("Here is my thought process:",), ("Here's my thought process:",)),
)
GPT_OSS = ReasoningFormat(
    name="gpt_oss",
    channels=HARMONY,
    writing=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    answer="<|channel|>final<|message|>",
    signs=(("<|channel|>", "<|message|>", "analysis"),),
)
