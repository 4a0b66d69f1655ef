"""GLM-4's own words for norms, for the tensors of GGUF files."""

from typing import Any

from headrace.models.weights.gguf_naming import GgufNaming


def name_norms(spec: Any) -> GgufNaming:
    """The norm before the MLP is called after attention, and the two post-norms by what they follow."""
    return GgufNaming(
        parts={
            "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm"
        }
    )
