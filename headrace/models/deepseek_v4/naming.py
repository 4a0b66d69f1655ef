"""Names of checkpoint tensors: maps the published checkpoints' names to module names, and transformers' names to the
published ones."""

from __future__ import annotations

import re

from headrace.parallel.share import Share

DRAFT = "mtp."
"""Name prefix of the tensors of the multi-token prediction layers (drafters)."""

HASH_TABLE = "layers.{i}.ffn.gate.tid2eid"
EXPERTS = "layers.{i}.ffn.experts"
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}

NAMES = {
    "embed": "embedding",
    "head": "ending.head",
    "norm": "ending.norm",
    **{f"hc_head_{kind}": f"ending.collapse.{kind}" for kind in ("fn", "base", "scale")},
    **{
        f"layers.{{i}}.hc_{theirs}_{kind}": f"layers.{{i}}.{ours}_mix.{kind}"
        for theirs, ours in (("attn", "attention"), ("ffn", "mlp")) for kind in ("fn", "base", "scale")
    },
    "layers.{i}.attn_norm": "layers.{i}.attention_norm",
    "layers.{i}.ffn_norm": "layers.{i}.mlp_norm",
    "layers.{i}.attn.wq_a": "layers.{i}.attention.down#q",
    "layers.{i}.attn.wkv": "layers.{i}.attention.down#kv",
    "layers.{i}.attn.q_norm": "layers.{i}.attention.q_norm",
    "layers.{i}.attn.kv_norm": "layers.{i}.attention.kv_norm",
    "layers.{i}.attn.wq_b": "layers.{i}.attention.q_up",
    "layers.{i}.attn.wo_a": "layers.{i}.attention.mix",
    "layers.{i}.attn.wo_b": "layers.{i}.attention.output",
    "layers.{i}.attn.attn_sink": "layers.{i}.attention.sinks",
    **{
        f"layers.{{i}}.attn.{where}compressor.{name}": f"layers.{{i}}.attention.{where}compressor.{name}"
        for where in ("", "indexer.") for name in ("ape", "norm")
    },
    **{
        f"layers.{{i}}.attn.{theirs}": f"layers.{{i}}.attention.project#{part}" for theirs, part in (
            ("compressor.wkv", "values"), ("compressor.wgate", "gates"), ("indexer.compressor.wkv", "index_values"),
            ("indexer.compressor.wgate", "index_gates"), ("indexer.weights_proj", "index_weights"),
        )
    },
    "layers.{i}.attn.indexer.wq_b": "layers.{i}.attention.indexer.q",
    "layers.{i}.ffn.gate": "layers.{i}.mlp.router.logits",
    "layers.{i}.ffn.gate.bias": "layers.{i}.mlp.router.choice_bias",
    f"{EXPERTS}.{{x}}.w1": "layers.{i}.mlp.experts.gate_up#{x}/gate",
    f"{EXPERTS}.{{x}}.w3": "layers.{i}.mlp.experts.gate_up#{x}/up",
    f"{EXPERTS}.{{x}}.w2": "layers.{i}.mlp.experts.down#{x}/down",
    "layers.{i}.ffn.shared_experts.w1": "layers.{i}.mlp.shared.gate_up#gate",
    "layers.{i}.ffn.shared_experts.w3": "layers.{i}.mlp.shared.gate_up#up",
    "layers.{i}.ffn.shared_experts.w2": "layers.{i}.mlp.shared.down",
}
"""Published name: ours. See `headrace.layers.loading`."""

# Applied in turn, each to the result of those before it: `.self_attn.` becomes `.attn.` before rules match `.attn.`,
# and the indexer's specific names come before the rule for the rest of the indexer.
DRAFT_MODULE = f"{DRAFT}0"
DRAFT_NAMES = {
    **{
        theirs.replace("layers.{i}", DRAFT_MODULE): ours.replace("layers.{i}", "block")
        for theirs, ours in NAMES.items() if "{i}" in theirs
    },
    **{f"{DRAFT_MODULE}.hc_head_{kind}": f"ending.collapse.{kind}" for kind in ("fn", "base", "scale")},
    f"{DRAFT_MODULE}.norm": "ending.norm",
    f"{DRAFT_MODULE}.enorm": "embedding_norm",
    f"{DRAFT_MODULE}.hnorm": "stream_norm",
    f"{DRAFT_MODULE}.e_proj": "embedding_projection",
    f"{DRAFT_MODULE}.h_proj": "stream_projection",
}
"""The same of the module that predicts the token after the next, `headrace.models.deepseek_v4.prediction`."""

_RULES = tuple((re.compile(theirs), published) for theirs, published in (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.attn\.compressor\.indexer\.(q_b_proj)\.", r".attn.indexer.\1."),
    (r"\.attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
    (r"\.attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"(compressor\.)position_bias$", r"\1ape"),
    (r"(compressor\.)gate_proj\.", r"\1wgate."),
    (r"(compressor\.)kv_norm\.", r"\1norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),  # as transformers saves it
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"(experts\.(?:\d+\.)?)gate_proj\.", r"\1w1."),
    (r"(experts\.(?:\d+\.)?)up_proj\.", r"\1w3."),
    (r"(experts\.(?:\d+\.)?)down_proj\.", r"\1w2."),
))


_EXPERT_NUMBER = re.compile(r"^(?:layers|mtp)\.\d+\.ffn\.experts\.(\d+)\.")


def is_of_other_expert(name: str, own: Share) -> bool:
    """Whether a published name is of an expert that is not among a rank's ``own``."""
    expert = _EXPERT_NUMBER.search(name)
    return expert is not None and not own.start <= int(expert[1]) < own.stop


def rename(name: str) -> str:
    """The published name of a tensor given under its transformers name; published names are returned unchanged."""
    for pattern, published in _RULES:
        name = pattern.sub(published, name)
    return name
