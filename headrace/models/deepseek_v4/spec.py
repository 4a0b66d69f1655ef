"""`DeepseekV4Spec`: a DeepSeek-V4 model as plain numbers, read from config.json with the field names of the published
checkpoints or those of transformers. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.base.cache import CACHE_POOLS, CacheSpec
from headrace.base.errors import ConfigError, PluginError
from headrace.layers.spec import MlpSpec, MoeSpec, RopeSpec, SwigluClamp
from headrace.models.config_fields import Fields, read_num_layers
from headrace.models.config_specs import make_rope, read_moe
from headrace.models.deepseek_v4 import layout
from headrace.parallel.division import Division
from headrace.parallel.share import Share, divide

logger = logging.getLogger(__name__)

RATIOS = {
    "sliding_attention": 0, "compressed_sparse_attention": layout.OVERLAPPING,
    "heavily_compressed_attention": layout.WIDE
}
"""transformers' ``layer_types`` to compress ratios, in tokens per entry."""

FALLBACK = {
    layout.WINDOW_FP8: layout.WINDOW, layout.ENTRIES_FP8: layout.ENTRIES, layout.INDEX_KEYS_FP8: layout.INDEX_KEYS,
}
"""Cache kinds packed in 8 bits to the same without packing."""


@dataclass(frozen=True)
class HeadsSpec:
    """Query heads over one vector per token, which is both key and value. The last ``rotary_dim`` of ``head_dim`` dims
    are rotated. ``window`` in tokens. Before the output projection, heads are projected in ``num_groups`` groups to
    ``group_rank`` dims each."""

    num_heads: int
    head_dim: int
    rotary_dim: int
    q_lora_rank: int
    window: int
    num_groups: int
    group_rank: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def share_groups(self, ranks: int, rank: int) -> Share:
        """The groups of heads of a rank; raises `ConfigError` where one would get none."""
        if self.num_groups < ranks:
            raise ConfigError(
                f"o_groups {self.num_groups} cannot be divided among {ranks} ranks; set tensor_parallel_size to "
                f"{self.num_groups} or less", param="tensor_parallel_size",
            )
        return Share(self.num_groups, *divide(self.num_groups, ranks, rank))


@dataclass(frozen=True)
class IndexerSpec:
    """The indexer's heads; a query attends to the ``top_k`` compressed entries that they score highest."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class HyperSpec:
    """Hyper-connections: number of parallel residual ``streams``; Sinkhorn ``iterations`` that make the mixing matrices
    doubly stochastic."""

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class V4LayerSpec:
    """``ratio``: tokens per compressed entry, 0 for a layer with only a sliding window. ``is_hashed``: experts are
    chosen by token id, not by score."""

    ratio: int
    is_hashed: bool


@dataclass(frozen=True)
class DeepseekV4Spec:
    """``plain_rope`` is for layers without compression, ``compressed_rope`` for the others. ``moe`` applies to every
    layer. ``keeps_mxfp4``: experts stay in MXFP4, as in the checkpoint."""

    hidden_size: int
    max_model_len: int
    vocab_size: int
    norm_eps: float
    heads: HeadsSpec
    indexer: IndexerSpec
    hyper: HyperSpec
    moe: MoeSpec
    plain_rope: RopeSpec
    compressed_rope: RopeSpec
    layers: tuple[V4LayerSpec, ...]
    keeps_mxfp4: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def check_division(self, division: Division) -> None:
        """See `headrace.parallel.division.Divisible`."""
        division.check_vocabulary(self.vocab_size)
        self.heads.share_groups(division.tensor, 0)
        self.moe.check_division(division)


def read_config(config: dict[str, Any]) -> DeepseekV4Spec:
    """Parse config.json in either spelling; raises `ConfigError`."""
    fields = Fields(config)
    head_dim = fields.integer("head_dim", 512)
    rotary_dim = fields.integer("qk_rope_head_dim", int(head_dim * fields.number("partial_rotary_factor", 64 / 512)))
    if fields.integer("num_key_value_heads", 1) != 1:
        raise ConfigError(
            "config.json: num_key_value_heads must be 1; keys and values are one vector that all heads share",
            param="num_key_value_heads"
        )
    num_heads, groups = fields.integer("num_attention_heads"), fields.integer("o_groups", 8)
    if num_heads % groups:
        raise ConfigError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of o_groups ({groups})",
            param="o_groups"
        )
    plain, compressed = _read_ropes(fields, rotary_dim)
    return DeepseekV4Spec(
        hidden_size=fields.integer("hidden_size"), max_model_len=fields.integer("max_position_embeddings"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        heads=HeadsSpec(
            num_heads, head_dim, rotary_dim, fields.integer("q_lora_rank"), fields.integer("sliding_window", 128),
            groups,
            fields.integer("o_lora_rank", 1024),
        ),
        indexer=IndexerSpec(
            fields.integer("index_n_heads", 64), fields.integer("index_head_dim", 128),
            fields.integer("index_topk", 512)
        ),
        hyper=HyperSpec(
            fields.integer("hc_mult", 4), fields.integer("hc_sinkhorn_iters", 20), fields.number("hc_eps", 1e-6)
        ),
        moe=_read_moe(fields), plain_rope=plain, compressed_rope=compressed, layers=_read_layers(fields),
        keeps_mxfp4=(
            (config.get("expert_dtype") or (config.get("quantization_config") or {}).get("expert_dtype")) == "fp4"
        ),
    )


def _read_ropes(fields: Fields, rotary_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """``(plain, compressed)``. Context extension (YaRN) applies to compressing layers only, and without scaling cosines
    and sines: ``attention_factor`` is 1."""
    rotated = Fields({**fields.config, "head_dim": rotary_dim})
    nested = fields.config.get("rope_parameters") or fields.config.get("rope_scaling") or {}
    stretch = (
        nested.get("compress") or {name: value for name, value in nested.items() if name not in ("main", "compress")}
    )
    stretch = {**stretch, "attention_factor": 1.0, "partial_rotary_factor": None}
    stretch["rope_theta"] = (
        stretch.get("rope_theta") if "compress" in nested else fields.number("compress_rope_theta", 160000.0)
    )
    plain = {"rope_theta": (nested.get("main") or {}).get("rope_theta") or fields.number("rope_theta", 10000.0)}
    return (
        make_rope(rotated, plain, theta=10000.0, interleaved=True),
        make_rope(rotated, stretch, theta=10000.0, interleaved=True),
    )


def _read_layers(fields: Fields) -> tuple[V4LayerSpec, ...]:
    num_layers, config = read_num_layers(fields), fields.config
    types = config.get("layer_types")
    ratios = config.get("compress_ratios") if types is None else [RATIOS.get(kind, kind) for kind in types]
    if (
        not isinstance(ratios, list) or len(ratios) < num_layers
        or not set(ratios) <= {0, layout.OVERLAPPING, layout.WIDE}
    ):
        raise ConfigError(
            f"config.json: compress_ratios must have {num_layers} numbers out of 0, {layout.OVERLAPPING} and "
            f"{layout.WIDE}, got {ratios}",
            param="compress_ratios",
        )
    rates = config.get("compress_rates") or {}
    if any(RATIOS.get(kind) != rate for kind, rate in rates.items()):
        raise ConfigError(
            f"config.json: compress_rates must be those of published models, {RATIOS}; got {rates}",
            param="compress_rates"
        )
    kinds = config.get("mlp_layer_types")
    num_hashed = config.get("num_hash_layers", 3) if kinds is None else kinds[:num_layers].count("hash_moe")
    return tuple(V4LayerSpec(ratio, i < num_hashed) for i, ratio in enumerate(ratios[:num_layers]))


def _read_moe(fields: Fields) -> MoeSpec:
    fields.choice("hidden_act", {"silu": "silu"}, "silu")
    clamp = SwigluClamp(fields.number("swiglu_limit", 10.0))
    score = fields.choice(
        "scoring_func", {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}, "sqrtsoftplus"
    )
    shared = MlpSpec(fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts", 1), clamp=clamp)
    return read_moe(
        fields, "n_routed_experts", intermediate_size="moe_intermediate_size", clamp=clamp, shared=shared, score=score,
        renormalise=fields.flag("norm_topk_prob", True), scale=fields.number("routed_scaling_factor", 1.5),
        choice_bias=True, in_float32=True,
    )


def cache_specs(spec: DeepseekV4Spec, kv_dtype: str) -> list[CacheSpec | None]:
    """One spec per cache, layer by layer in the order of `places`. FP8 means packed slots with scales; if the packed
    pools cannot be loaded, vectors are kept in bfloat16 and a warning is logged."""
    return [own for layer in spec.layers for own in layer_cache_specs(spec, layer, kv_dtype)]


def layer_cache_specs(spec: DeepseekV4Spec, layer: V4LayerSpec, kv_dtype: str) -> list[CacheSpec | None]:
    """Those of one layer."""
    packed, dtype = kv_dtype == layout.FP8, kv_dtype
    if packed:
        try:
            layout.packed_value_bytes(spec.heads.head_dim)
            for kind in FALLBACK:
                CACHE_POOLS.load(kind)
        except PluginError as error:
            logger.warning("keys and values are kept in bfloat16: %s", error)
            packed, dtype = False, "bfloat16"
    return [place if packed else _unpack(place, dtype) for place in places(spec, layer)]


def widen_caches(specs: list[CacheSpec | None]) -> list[CacheSpec | None]:
    """The same where steps verify drafts, with longer rings of compressor state."""
    return [
        msgspec.structs.replace(place, window=layout.draft_ring_rows(place.compress_ratio))
        if place is not None and place.kind == layout.STATE else place for place in specs
    ]


def narrow_keys(specs: list[CacheSpec | None]) -> list[CacheSpec | None]:
    """The same with index keys in MXFP4 where they are in 8 bits."""
    return [
        msgspec.structs.replace(place, kind=layout.INDEX_KEYS_FP4, dtype=layout.FP4)
        if place is not None and place.kind == layout.INDEX_KEYS_FP8 else place for place in specs
    ]


def host_caches(
    spec: DeepseekV4Spec, specs: list[CacheSpec | None], hot_slots: int
) -> list[CacheSpec | None]:
    """The same with the entries that an indexer selects from in host memory. Raises `ConfigError` for too few slots."""
    if hot_slots < spec.indexer.top_k:
        raise ConfigError(
            f"hot_slots {hot_slots} cannot hold the {spec.indexer.top_k} entries that a token selects: set it to "
            f"{2 * spec.indexer.top_k}, or more where other entries are wanted with each token", param="hot_slots"
        )
    kinds = (layout.ENTRIES, layout.ENTRIES_FP8)
    return [
        place.behind(hot_slots, spec.indexer.top_k)
        if place is not None and place.kind in kinds and place.compress_ratio == layout.OVERLAPPING else place
        for place in specs
    ]


def places(spec: DeepseekV4Spec, layer: V4LayerSpec) -> Iterator[CacheSpec]:
    """The caches of a layer, in 8 bits: its sliding window; if it compresses, its entries and the compressor's state;
    if it has an indexer, index keys and the state of the indexer's compressor."""
    dim, index_dim, ratio = spec.heads.head_dim, spec.indexer.head_dim, layer.ratio
    yield CacheSpec(layout.WINDOW_FP8, 1, dim, dim, layout.FP8, window=spec.heads.window)
    if ratio:
        yield CacheSpec(layout.ENTRIES_FP8, 1, dim, dim, layout.FP8, compress_ratio=ratio)
        yield _state(ratio, dim)
    if ratio == layout.OVERLAPPING:
        yield CacheSpec(layout.INDEX_KEYS_FP8, 1, index_dim, index_dim, layout.FP8, compress_ratio=ratio)
        yield _state(ratio, index_dim)


def _state(ratio: int, dim: int) -> CacheSpec:
    series = 2 if ratio == layout.OVERLAPPING else 1  # overlapping: a token has dims for two entries, see `Compressor`
    return CacheSpec(
        layout.STATE, 1, series * dim, series * dim, "float32", window=layout.ring_rows(ratio), compress_ratio=ratio
    )


def _unpack(place: CacheSpec, dtype: str) -> CacheSpec:
    if place.kind not in FALLBACK:
        return place
    return CacheSpec(
        FALLBACK[place.kind], 1, place.head_dim, place.value_dim, dtype, place.window, place.compress_ratio
    )
