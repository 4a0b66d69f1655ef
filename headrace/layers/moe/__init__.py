"""Mixture of experts: the contract, and the registrations of dispatchers, experts and adapters with the layers that
each supports. The predicates run before a plug-in is imported; the shape of their queries is made by `MoeMlp`.
"""

from __future__ import annotations

from headrace.kernels.coded_linear.device_codes import BLOCK
from headrace.kernels.moe import CODED_EXPERTS, ROUNDED_EXPERTS, RUN_EXPERTS
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear.layout import PANEL
from headrace.layers.moe.contract import ADAPTERS, CHOICES, DISPATCHERS, EXPERTS, GROUPED, adapter_name


def reason_against_many_ranks(query: KernelQuery) -> str | None:
    """For dispatchers that do not move tokens between devices."""
    ranks = query.shape.get("ranks", 1)
    return f"keeps tokens on one device, and the experts are on {ranks}" if ranks > 1 else None


def reason_against_one_rank(query: KernelQuery) -> str | None:
    """For dispatchers among several ranks."""
    if query.shape.get("ranks", 1) > 1:
        return None
    return "divides experts among ranks, and here they are not; set enable_expert_parallel and several ranks"


def reason_against_replicas(query: KernelQuery) -> str | None:
    """For the dispatcher that needs all tokens on all ranks."""
    replicas = query.shape.get("replicas", 1)
    if replicas > 1:
        return f"needs the same tokens on all ranks, and {replicas} replicas have different ones"
    return reason_against_one_rank(query)


def reason_against_encoded(query: KernelQuery) -> str | None:
    """For experts that take plain matrices."""
    return "takes plain matrices, and the experts are kept in 4 bits" if query.shape.get("mxfp4") else None


def reason_against_plain(query: KernelQuery) -> str | None:
    """For experts that take MXFP4 only."""
    return None if query.shape.get("mxfp4") else "takes experts that are kept in MXFP4"


def reason_against_fused_mxfp4(query: KernelQuery) -> str | None:
    """For kernels that multiply codes: their order is of blocks of `BLOCK` inputs."""
    if query.device != "cuda" or CODED_EXPERTS.reason_against("triton", query):
        return "has no kernels for this device and dtype"
    if any(query.shape.get(width, 0) % BLOCK for width in ("width", "expert_width")):
        return f"takes widths in steps of {BLOCK}"
    return reason_against_plain(query)


def reason_against_fused(query: KernelQuery) -> str | None:
    """For the fused GPU kernels: on devices and dtypes for which `RUN_EXPERTS` has one."""
    if query.device != "cuda" or RUN_EXPERTS.reason_against("triton_pdl", query):
        return "has no kernels for this device and dtype"
    return reason_against_encoded(query)


def reason_against_rounded(query: KernelQuery) -> str | None:
    """For kernels that round activations, which no layer gets unless it is asked for. Plain matrices may become MXFP4
    when they are loaded."""
    if query.shape.get("moves") and not query.shape.get("mxfp4"):
        return "takes experts in MXFP4, and those of this model are dequantised, as they move between ranks"
    if any(query.shape.get(width, 0) % 16 for width in ("width", "expert_width")):
        return "takes widths in steps of 16"
    if query.shape.get("mxfp4") and (reason := reason_against_fused_mxfp4(query)):
        return reason
    return ROUNDED_EXPERTS.reason_against("cuda", query)


def reason_against_stored(query: KernelQuery) -> str | None:
    """For packed matrices on a CPU: kernels address an expert by its first panel, so sizes are multiples of `PANEL`."""
    if query.shape.get("moves"):
        return "packs matrices, and experts move between ranks"
    if query.device != "cpu" or query.dtype not in ("float32", "bfloat16"):
        return "takes float32 and bfloat16 on a CPU"
    if any(width % PANEL for width in (query.shape.get("width", 1), 2 * query.shape.get("expert_width", 1))):
        return f"takes widths in steps of {PANEL}"
    return reason_against_encoded(query)


DISPATCHERS.add(
    "none", "headrace.layers.moe.reference:LocalDispatcher", speaks=CHOICES, supports=reason_against_many_ranks,
    doc="every expert is on this device",
)
DISPATCHERS.add(
    "replicated", "headrace.layers.moe.reference:ReplicatedDispatcher", speaks=CHOICES,
    supports=reason_against_replicas, priority=20,
    doc="every rank has all tokens and some experts; what it computes is a part of the sum",
)
DISPATCHERS.add(
    "all-gather", "headrace.layers.moe.exchange:GatheringDispatcher", speaks=CHOICES, supports=reason_against_one_rank,
    priority=10, doc="all tokens to all ranks; sums return to where a token came from",
)
DISPATCHERS.add(
    "all-to-all", "headrace.layers.moe.exchange:ExchangingDispatcher", speaks=CHOICES,
    supports=reason_against_one_rank, doc="a token to the ranks of its experts only, and their sums back",
)
EXPERTS.add(
    "reference", "headrace.layers.moe.reference:ReferenceExperts", speaks=CHOICES, supports=reason_against_encoded,
    waits=True, doc="plain torch, an expert at a time",
)
EXPERTS.add(
    "grouped", "headrace.layers.moe.grouped:GroupedExperts", speaks=GROUPED, supports=reason_against_encoded,
    priority=10, doc="all experts in one product",
)
EXPERTS.add(
    "stored", "headrace.layers.moe.stored:StoredExperts", supports=reason_against_stored, priority=15,
    doc="on a CPU: one native call, matrices plain or in 8 or 4 bits",
)
EXPERTS.add(
    "fused", "headrace.layers.moe.grouped:FusedExperts", supports=reason_against_fused, priority=20,
    doc="on a GPU: few kernels from choices to sums for few tokens, as grouped for many",
)
EXPERTS.add(
    "mxfp4", "headrace.layers.moe.mxfp4:Mxfp4Experts", speaks=GROUPED, supports=reason_against_plain,
    waits=True, doc="experts kept in MXFP4, dequantised a few at a time",
)
EXPERTS.add(
    "mxfp4_fused", "headrace.layers.moe.mxfp4:FusedMxfp4Experts", supports=reason_against_fused_mxfp4, priority=20,
    doc="on a GPU: experts kept in MXFP4, few kernels from choices to sums",
)
EXPERTS.add(
    "rounded", "headrace.layers.moe.rounded:RoundedExperts", supports=reason_against_rounded, priority=-10,
    doc="only by name, on Hopper: experts in MXFP4, activations of prompts rounded to FP8",
)
ADAPTERS.add(
    adapter_name(CHOICES, GROUPED), "headrace.layers.moe.grouped:group_choices",
    doc="sort pairs of token and expert by expert",
)
