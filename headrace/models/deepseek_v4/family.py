"""DeepSeek-V4: attention over a sliding window and over compressed entries, hyper-connections, experts routed by score
or by token id.

Importing the module registers its cache kinds: a policy for the scheduler, a pool for memory, a backend for layers.
"""

from __future__ import annotations

from headrace.base.cache import add_cache_kind
from headrace.layers.names import CheckpointNames
from headrace.models.deepseek_v4 import layout
from headrace.models.deepseek_v4.naming import NAMES
from headrace.models.deepseek_v4.spec import cache_specs, read_config
from headrace.models.family import Family

_CHAINED = "headrace.scheduling.cache.groups:FullPolicy"
_WINDOWED = "headrace.scheduling.cache.groups:SlidingWindowPolicy"
_OWN = "headrace.models.deepseek_v4"

for _kind, _policy, _pool, _backend, _doc in (
    (layout.WINDOW, _WINDOWED, "pools:VectorPool", "backends:WindowBackend", "vectors of the latest tokens"),
    (layout.WINDOW_FP8, _WINDOWED, "packed_pools:PackedVectorPool", "backends:WindowBackend", "the same in 8 bits"),
    (layout.ENTRIES, _CHAINED, "pools:VectorPool", "backends:EntriesBackend", "a vector for each window of tokens"),
    (layout.ENTRIES_FP8, _CHAINED, "packed_pools:PackedVectorPool", "backends:EntriesBackend", "the same in 8 bits"),
    (layout.INDEX_KEYS, _CHAINED, "pools:VectorPool", "backends:EntriesBackend", "what chooses among entries"),
    (layout.INDEX_KEYS_FP8, _CHAINED, "packed_pools:PackedKeyPool", "backends:EntriesBackend", "the same in 8 bits"),
    (layout.INDEX_KEYS_FP4, _CHAINED, "packed_pools:NarrowKeyPool", "backends:EntriesBackend", "the same in MXFP4"),
    (
        layout.STATE, f"{_OWN}.layout:CompressorStatePolicy", "pools:StatePool", "backends:StateBackend",
        "tokens of unfinished windows"
    ),
):
    add_cache_kind(_kind, policy=_policy, pool=f"{_OWN}.{_pool}", backend=f"{_OWN}.{_backend}", doc=_doc)

FAMILY = Family(
    name="deepseek_v4",
    architectures=("DeepseekV4ForCausalLM",),
    read_config=read_config,
    cache_specs=cache_specs,
    names=CheckpointNames(NAMES),
    model="headrace.models.deepseek_v4.model:DeepseekV4Model",
    tool_parser="deepseek_v4",
    reasoning_parser="deepseek_v4",
    chat_encoder="headrace.models.deepseek_v4.encoding:ChatEncoder",
)
