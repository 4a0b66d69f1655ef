"""The known formats by name. Names of model lines belong here: a format is called after those who write it.
"""

from __future__ import annotations

from headrace.base.registry import Registry
from headrace.service.parsing.format import ReasoningFormat, ToolFormat

TOOL_FORMATS: Registry[ToolFormat] = Registry("tool parser")
REASONING_FORMATS: Registry[ReasoningFormat] = Registry("reasoning parser")

# In the order in which a chat template is searched for their signs: the particular before the general.
TOOL_NAMES = (
    "gpt_oss", "deepseek_v4", "deepseek_v32", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45", "qwen3_coder",
    "granite", "mistral", "pythonic",
    "llama3_json", "gemma", "hermes",
)
REASONING_NAMES = (
    "gpt_oss", "kimi", "mistral", "granite", "deepseek_v4", "deepseek_v3", "deepseek_r1", "kimi_k2", "glm45", "qwen3"
)

for _at, _name in enumerate(reversed(TOOL_NAMES)):
    TOOL_FORMATS.add(_name, f"{__name__}.tools:{_name.upper()}", priority=_at)
for _at, _name in enumerate(reversed(REASONING_NAMES)):
    REASONING_FORMATS.add(_name, f"{__name__}.reasoning:{_name.upper()}", priority=_at)

ALIASES = {
    "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "llama4_pythonic": "pythonic",
    "qwen3coder": "qwen3_coder",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45", "glm47": "glm45", "openai": "gpt_oss", "gptoss": "gpt_oss",
}
"""What other servers call some of them; hyphens and underscores are the same."""
