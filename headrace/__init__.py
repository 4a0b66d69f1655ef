"""Headrace serves large language models. The names in ``__all__`` are imported on first use, so that
``import headrace`` is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.base import VERSION

__version__ = VERSION
__all__ = ["LLM", "AsyncLLM", "Grammar", "LoRARequest", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from headrace.base.adapters import LoRARequest
    from headrace.base.grammar import Grammar
    from headrace.base.sampling import SamplingParams
    from headrace.serving.offline.async_llm import AsyncLLM
    from headrace.serving.offline.llm import LLM

_HOMES = {
    "LLM": "headrace.serving.offline.llm",
    "AsyncLLM": "headrace.serving.offline.async_llm",
    "SamplingParams": "headrace.base.sampling",
    "LoRARequest": "headrace.base.adapters",
    "Grammar": "headrace.base.grammar",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
