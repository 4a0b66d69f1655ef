"""Sampling a token from each row's logits: grammar bitmask, temperature, min-p, top-k, top-p, then the choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import Operation, requires

OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2
"""States of a sampled row, in ``sampled[1]``; see `SAMPLE`."""


@dataclass(slots=True)
class SampleParams:
    """Per row, on the device: ``temperature`` (0: greedy), ``top_p`` and ``min_p`` [S] float64; ``top_k``
    (0: all), ``seed`` and ``position`` (index of the sampled token in the row's output) [S] int64.

    The rest is about the whole batch and known to the host: ``has_min_p``, ``has_top_p``: some row uses it.
    ``num_ranked``: how many of a row's largest logits decide every cut: the largest top_k, V when a row has top_p
    alone, 0 for no cut. They only save work: none of the three may change which token a row gets.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    has_min_p: bool
    has_top_p: bool
    num_ranked: int


SAMPLE = Operation("sample kernel")
"""``sample(logits [S, V] float32, *, params: SampleParams | None = None, masks=None, mask_of_row=None, before=None) ->
sampled [2, S] int64``: ids and states.

First, in place, row s of the logits becomes -inf wherever the bit of a token in ``masks[mask_of_row[s]]`` is 0; masks
are [G, W] int32, W = ceil(V / 32), and token v is bit ``v % 32``, counted from the least significant, of word ``v //
32``; ``mask_of_row`` [S] int32 is negative where nothing is forbidden. Then rows with temperature 0 (all rows
if ``params`` is None) take the argmax, and the others sample.

Sampling divides the logits by the temperature and cuts in this order: ``min_p`` keeps tokens with at least ``min_p``
times the largest probability; ``top_k`` keeps the k most likely of those; ``top_p`` keeps the smallest set of the most
likely of those whose probability among them reaches ``top_p``. Tokens tied with the last one kept are kept too. One
token is then sampled by its probability among the kept ones.

The result depends only on the row's logits, mask, parameters, seed and position: the same seed gives the same tokens in
every batch on the same device. The state is NOT_FINITE where the largest logit before masking is NaN or infinite
(``before`` [S] float32 holds these values if the logits were edited since; otherwise the logits are read),
NOTHING_ALLOWED where the largest logit is not finite after masking; the id is then an arbitrary one in [0, V)."""

_on_cpu = requires(device="cpu", dtypes=("float32",))
_on_gpu = requires(device="cuda")
SAMPLE.add("reference", "headrace.kernels.sample.reference:sample", doc="plain torch, inverse CDF in float64")
SAMPLE.add(
    "cpu", "headrace.kernels.sample.cpu:sample", supports=_on_cpu, priority=10,
    doc="own C++: one pass to mask and search, cuts by selection"
)
SAMPLE.add(
    "triton", "headrace.kernels.sample.triton:sample", supports=_on_gpu, priority=10,
    doc="one launch; threshold search, no sort"
)

ARGMAX = Operation("argmax kernel")
"""``argmax(logits [S, V] float32) -> (values [S], ids [S] int64)``: each row's largest logit and its
token; the value is NaN when the row holds one, and the id is then an arbitrary one in [0, V)."""

ARGMAX.add("reference", "headrace.kernels.sample.reference:argmax", doc="plain torch")
ARGMAX.add("cpu", "headrace.kernels.sample.cpu:argmax", supports=_on_cpu, priority=10, doc="own C++, one pass")
ARGMAX.add(
    "triton", "headrace.kernels.sample.triton:argmax", supports=_on_gpu, priority=10, doc="parts of a row side by side"
)

SAMPLE_GREEDY = Operation("sample_greedy kernel")
"""``sample_greedy(logits [B, V] float32) -> sampled [2, B] int64``: `SAMPLE` where every row is greedy and unmasked:
``sampled[0]`` are the ids, ``sampled[1]`` the states OK or NOT_FINITE."""

ARGMAX_SHARE = Operation("argmax kernel for a share of the vocabulary")
"""``argmax_share(logits [S, v] float32, first) -> [S, 2] int32``: of the logits of v tokens from token ``first`` on,
the bits of each row's largest one and its token; as `ARGMAX` where a row holds NaN."""

MERGE_SHARES = Operation("kernel that merges argmaxes of shares")
"""``merge_shares(shares [S, 2 * W] int32) -> sampled [2, S] int64``: `SAMPLE_GREEDY` of rows whose logits are those of
W shares, in order, of each of which `ARGMAX_SHARE` found the largest."""

ARGMAX_SHARE.add("reference", "headrace.kernels.sample.reference:argmax_share", doc="plain torch")
ARGMAX_SHARE.add(
    "triton", "headrace.kernels.sample.triton:argmax_share", supports=_on_gpu, priority=10,
    doc="the argmax kernel stores the result"
)
MERGE_SHARES.add("reference", "headrace.kernels.sample.reference:merge_shares", doc="plain torch")
MERGE_SHARES.add(
    "triton", "headrace.kernels.sample.triton:merge_shares", supports=_on_gpu, priority=10, doc="one launch"
)

SAMPLE_GREEDY.add("reference", "headrace.kernels.sample.reference:sample_greedy", doc="plain torch")
SAMPLE_GREEDY.add(
    "triton", "headrace.kernels.sample.triton:sample_greedy", supports=_on_gpu, priority=10,
    doc="the argmax kernel stores the result"
)
