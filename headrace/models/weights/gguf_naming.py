"""Maps GGUF tensors to Hugging Face checkpoint tensors: names, row order, offsets. Torch-free.

`Family.gguf_naming` holds what differs between families. GGUF names follow the tensor table of the gguf package; the
changes that llama.cpp's converter makes to values are undone, see `GgufNaming`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.errors import WeightError
from headrace.layers.names import GgufNaming
from headrace.models.weights.gguf_file import CONSTANT_TENSORS, GgufTensor

GLOBAL_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)")


@dataclass(frozen=True)
class NamedTensor:
    """A GGUF tensor under its checkpoint name. ``row_order`` [rows]: index of the stored row that becomes each row
    (None: as stored); ``offset`` is subtracted from every value."""

    name: str
    stored: GgufTensor
    row_order: np.ndarray | None = None
    offset: float = 0.0


def name_tensors(tensors: Iterable[GgufTensor], metadata: Mapping[str, Any], naming: GgufNaming) -> list[NamedTensor]:
    """Rename every weight to its checkpoint name; an unknown name is kept, and the loader reports it. Constant tensors
    are left out.

    Raises `WeightError` when the row order of q or k cannot be restored because the head count is invalid.
    """
    stored = [tensor for tensor in tensors if tensor.name not in CONSTANT_TENSORS]
    present = {tensor.name for tensor in stored}
    return [_name_tensor(tensor, present, metadata, naming) for tensor in stored]


def _name_tensor(tensor: GgufTensor, present: set[str], metadata: Mapping[str, Any], naming: GgufNaming) -> NamedTensor:
    match = _BLOCK.fullmatch(tensor.name)
    if match is None:
        part, _, suffix = tensor.name.rpartition(".")
        name = f"{GLOBAL_PARTS[part]}.{suffix}" if part in GLOBAL_PARTS else tensor.name
        return NamedTensor(name, tensor, offset=_norm_offset(part, suffix, naming))
    block, part, suffix = match.groups()
    home = naming.parts.get(part) or _structural_part(f"blk.{block}.", part, present) or BLOCK_PARTS.get(part)
    name = f"model.layers.{block}.{home}.{suffix}" if home else tensor.name
    order = None
    if naming.is_rotary_interleaved and part in ("attn_q", "attn_k"):
        order = deinterleaved_rows(tensor, _head_count(metadata, part, int(block)))
    return NamedTensor(name, tensor, order, _norm_offset(part, suffix, naming))


def _structural_part(prefix: str, part: str, present: set[str]) -> str | None:
    """Names that depend on the block's other tensors. ``ffn_norm`` is called ``post_attention_layernorm`` in
    checkpoints unless the block also has a norm after attention; an up projection without a gate is gate and up
    stacked."""
    if part == "ffn_norm" and f"{prefix}post_attention_norm.weight" in present:
        return "pre_feedforward_layernorm"
    if part == "ffn_up" and f"{prefix}ffn_gate.weight" not in present:
        return "mlp.gate_up_proj"
    return None


def _norm_offset(part: str, suffix: str, naming: GgufNaming) -> float:
    return naming.norm_offset if part.endswith("norm") and suffix == "weight" else 0.0


def _head_count(metadata: Mapping[str, Any], part: str, block: int) -> int:
    prefix = f"{metadata.get('general.architecture')}.attention."
    count = metadata.get(prefix + "head_count")
    if part == "attn_k":
        count = metadata.get(prefix + "head_count_kv", count)
    if isinstance(count, np.ndarray):
        count = int(count[block]) if block < len(count) else None
    if not isinstance(count, int) or count <= 0:
        raise WeightError(f"GGUF metadata {prefix}head_count is {count!r}, which is no number of heads")
    return count


def deinterleaved_rows(tensor: GgufTensor, num_heads: int) -> np.ndarray:
    """Index of the stored row for each row, [rows]. The converter stores the rows of a head as [E / 2, 2] (rotation
    pairs adjacent); checkpoints have [2, E / 2] (halves)."""
    rows = tensor.shape[0]
    if rows % (2 * num_heads):
        raise WeightError(f"GGUF tensor {tensor.name} has {rows} rows, which {num_heads} heads cannot share in pairs")
    return np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2).swapaxes(1, 2).ravel()
