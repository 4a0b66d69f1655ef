"""gpt-oss's own words, for the tensors of GGUF files."""

from typing import Any

from headrace.models.weights.gguf_naming import GgufNaming


def name_router(spec: Any) -> GgufNaming:
    """The router is not called gate."""
    return GgufNaming(parts={"ffn_gate_inp": "mlp.router"})
