"""DeepSeek-V3.2 and GLM-5: latent attention to the tokens that a lightning indexer selects, else as DeepSeek-V3.
DeepSeek-V3.2-Exp, 2025, section 2; arXiv:2412.19437.

Importing the module registers its kind of cache.
"""

from __future__ import annotations

from headrace.base.cache import add_cache_kind
from headrace.layers.names import LATENT_NAMES, CheckpointNames
from headrace.models.deepseek_v32.spec import HOSTED, ROWS, read_config
from headrace.models.family import Family, decoder_architectures

NAMES = {
    **LATENT_NAMES,
    **{
        f"model.layers.{{i}}.self_attn.indexer.{theirs}": f"layers.{{i}}.attention.indexer.{ours}"
        for theirs, ours in (("wq_b", "q"), ("wk", "key"), ("k_norm", "key_norm"), ("weights_proj", "weights"))
    },
}

add_cache_kind(
    ROWS, policy="headrace.scheduling.cache.groups:FullPolicy", pool="headrace.memory.pools:LatentPool",
    backend="headrace.models.deepseek_v32.backend:RowsBackend", doc="a latent and an index key for each token",
)

add_cache_kind(
    HOSTED, policy="headrace.scheduling.cache.groups:FullPolicy",
    pool="headrace.models.deepseek_v32.pool:HostedRowsPool",
    backend="headrace.models.deepseek_v32.backend:RowsBackend", doc="the same, latents in host memory",
)

FAMILY = Family(
    name="deepseek_v32",
    architectures=decoder_architectures("DeepseekV32", "GlmMoeDsa"),
    read_config=read_config,
    names=CheckpointNames(
        NAMES, renames={".self_attn.q_a_proj.": ".self_attn.q_proj."}, has_draft_layers=True,
    ),
)
