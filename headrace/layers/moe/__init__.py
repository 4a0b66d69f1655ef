"""Mixtures of experts: the contract, and the dispatchers, experts and adapters, registered here by what they can
serve."""

from headrace.layers.moe import support
from headrace.layers.moe.contract import ADAPTERS, CHOICES, DISPATCHERS, EXPERTS, GROUPED, adapter_name

DISPATCHERS.add(
    "none", "headrace.layers.moe.local:LocalDispatcher", speaks=CHOICES, supports=support.reason_against_many_ranks,
    doc="every expert is on this device",
)
EXPERTS.add(
    "reference", "headrace.layers.moe.reference:ReferenceExperts", speaks=CHOICES,
    supports=support.reason_against_packed,
    doc="plain torch, an expert at a time",
)
EXPERTS.add(
    "grouped", "headrace.layers.moe.grouped:GroupedExperts", speaks=GROUPED, supports=support.reason_against_packed,
    priority=10,
    doc="all experts in one product",
)
EXPERTS.add(
    "stored", "headrace.layers.moe.stored:StoredExperts", supports=support.reason_against_stored, priority=15,
    doc="on a CPU: one native call, matrices plain or in 8 or 4 bits",
)
EXPERTS.add(
    "joined", "headrace.layers.moe.joined:JoinedExperts", supports=support.reason_against_joined, priority=20,
    doc="on a GPU: few kernels from choices to sums for few tokens, as grouped for many",
)
EXPERTS.add(
    "mxfp4", "headrace.layers.moe.packed:PackedExperts", speaks=GROUPED, supports=support.reason_against_plain,
    doc="experts kept in MXFP4, dequantised a few at a time",
)
ADAPTERS.add(
    adapter_name(CHOICES, GROUPED), "headrace.layers.moe.adapters:group_choices",
    doc="sort pairs of token and expert by expert"
)
