"""`IndexedAttentionSpec` and the reading of config.json. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.layers.spec import DecoderSpec, LatentAttentionSpec, LayerSpec, SelectingAttention
from headrace.models.config_fields import Fields
from headrace.models.config_specs import (
    add_experts,
    read_decoder,
    read_latent_attention,
    read_layers,
    read_rope,
    read_sigmoid_routing,
)

ROWS, HOSTED = "deepseek_v32.rows", "deepseek_v32.hosted"
"""The cache kinds: of each token a latent, the rotated part of its key, and its index key, in one row; and the index
key alone on the device, the others in host memory. There ``value_dim`` are the dims in host memory."""
DEFAULTS = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_routed_experts": 256, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "index_topk": 2048, "index_head_dim": 128,
}
V32_DEFAULTS = {"n_group": 8, "topk_group": 4, "index_n_heads": 64, "max_position_embeddings": 163840}
GLM_DEFAULTS = {"n_group": 1, "topk_group": 1, "index_n_heads": 32, "max_position_embeddings": 202752}


@dataclass(frozen=True, kw_only=True)
class IndexedAttentionSpec(LatentAttentionSpec, SelectingAttention):
    """Latent attention to the ``top_k`` earlier tokens that an indexer of ``index_heads`` heads scores highest.
    ``selects``: False for a layer without an indexer, which attends to what the layer before it has selected.
    ``index_interleaved``: the indexer rotates adjacent dims, not halves."""

    index_heads: int
    index_head_dim: int
    top_k: int
    index_interleaved: bool
    selects: bool = True

    branch: ClassVar[str] = "headrace.models.deepseek_v32.attention:IndexedAttention"

    @property
    def row_dim(self) -> int:
        """Dims of a cached latent and the rotated part of its key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def cache_spec(self, layer: LayerSpec, kv_dtype: str) -> CacheSpec:
        """The same for every layer, so that all share what is prepared for a step."""
        return CacheSpec(ROWS, 1, self.row_dim + self.index_head_dim, self.kv_lora_rank, kv_dtype)

    def host_cache(self, place: CacheSpec, hot_slots: int) -> CacheSpec:
        """See `SelectingAttention`; index keys stay on the device."""
        if hot_slots < self.top_k:
            raise ConfigError(
                f"hot_slots {hot_slots} cannot hold the {self.top_k} tokens that a token selects: set it to "
                f"{2 * self.top_k}, or more where others are selected by each token", param="hot_slots"
            )
        return CacheSpec(HOSTED, 1, place.head_dim, self.row_dim, place.dtype).behind(hot_slots, self.top_k)


def read_config(config: dict[str, Any]) -> DecoderSpec:
    """DeepSeek-V3.2, and GLM's variant, of which some layers have no indexer. Raises `ConfigError`."""
    is_glm = config["architectures"][0].startswith("Glm")
    given = {name: value for name, value in config.items() if value is not None}
    fields = Fields({**DEFAULTS, **(GLM_DEFAULTS if is_glm else V32_DEFAULTS), **given})
    latent = read_latent_attention(fields)
    if not latent.q_lora_rank:
        raise ConfigError(
            "config.json: q_lora_rank must be given: the indexer reads query latents", param="q_lora_rank"
        )
    kinds = fields.config.get("mlp_layer_types")
    if kinds is not None:
        num_dense = kinds.count("dense")
        if kinds != ["dense"] * num_dense + ["sparse"] * (len(kinds) - num_dense):
            raise ConfigError(
                "config.json: mlp_layer_types must be dense layers, then sparse ones", param="mlp_layer_types"
            )
        fields.config["first_k_dense_replace"] = num_dense
    attention = IndexedAttentionSpec(
        **asdict(latent), index_heads=fields.integer("index_n_heads"), index_head_dim=fields.integer("index_head_dim"),
        top_k=fields.integer("index_topk"), index_interleaved=is_glm,
    )
    if attention.qk_rope_head_dim > attention.index_head_dim:
        raise ConfigError(
            f"config.json: index_head_dim ({attention.index_head_dim}) must be at least qk_rope_head_dim "
            f"({attention.qk_rope_head_dim}): the indexer rotates so many dims", param="index_head_dim",
        )
    layers = read_layers(fields, read_rope(fields, interleaved=True))
    selects = [True] * len(layers) if not is_glm else _read_indexers(fields, len(layers))
    without = replace(attention, selects=False)
    layers = tuple(
        layer if own else replace(layer, attention=without, follows=True)
        for layer, own in zip(layers, selects, strict=True)
    )
    return read_decoder(fields, add_experts(fields, layers, read_sigmoid_routing(fields)), attention=attention)


def _read_indexers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have an indexer: ``indexer_types``, a pattern of F and S, or every so many layers."""
    config = fields.config
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        every = max(fields.integer("index_topk_freq", 1), 1)
        offset = fields.integer("index_skip_topk_offset", 2)
        return [max(i - offset + 1, 0) % every == 0 for i in range(num_layers)]
    known = {"full": True, "F": True, "shared": False, "S": False}
    if len(kinds) < num_layers or not set(kinds) <= set(known) or not known[kinds[0]]:
        raise ConfigError(
            f"config.json: indexer_types must say full or shared for each of {num_layers} layers, full for the first; "
            f"got {kinds}", param="indexer_types",
        )
    return [known[kind] for kind in kinds[:num_layers]]
