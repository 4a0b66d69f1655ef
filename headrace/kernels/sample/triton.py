"""Sampling without sorting: a cut (top-k, top-p) is found by searching for the threshold that the kept logits exceed.

S sampled rows, V vocabulary. One program per row reads its logits a few times (from L2, after the first), gathers the
most likely candidates into a workspace of BLOCK entries, and searches among these; if a cut may lie outside them (flat
distribution), it searches the whole row. The CDF is inverted in token order at the reference's own uniform number, so
that both choose the same token.

y stands for logit / temperature - its maximum, float32: 0 for the most likely token, exp(y) its relative weight.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels import sample as contract
from headrace.kernels.launch import ceil_div
from headrace.kernels.sample import SampleParams

BLOCK = 8192
MAX_REGISTERS = 64
"""Registers of a thread in the sampling kernel, so that an SM holds two rows. Unbounded it takes 103, and 40 % more
time for 256 rows."""
LOWEST = tl.constexpr(-104.0)  # exp of anything lower is 0 in float32: such a token is never sampled
FORBIDDEN = tl.constexpr(-1.0e30)  # replaces -inf: division takes three times as long for infinities
DEEP, DEEPER = tl.constexpr(9.0), tl.constexpr(4.0)
"""Candidates are first gathered down to DEEP below the largest logit, then DEEPER more or less. Measured on two models
(vocabularies of 49 k and 262 k) at temperature 1: at most 6,800 tokens lie above the first floor, with 0.91 to 0.99 of
the probability."""
SEARCH_STEPS = tl.constexpr(16)  # 104 / 4**16 is below the spacing of float32 at the depths that matter
NEGATIVE = tl.constexpr(-float("inf"))
# jitted functions may read globals only as constexpr
NOT_FINITE, NOTHING_ALLOWED = tl.constexpr(contract.NOT_FINITE), tl.constexpr(contract.NOTHING_ALLOWED)


@triton.jit
def _scaled(row_ptr, at, V, temperature, best, BLOCK: tl.constexpr):
    """y [BLOCK] of the tokens from ``at`` on: logits / temperature - best; far below `LOWEST` beyond the vocabulary and
    where a logit is -inf."""
    index = at + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + index, mask=index < V, other=FORBIDDEN)
    # div_rn: correctly rounded like torch's division, where Triton's own is approximate
    return tl.math.div_rn(tl.maximum(x, FORBIDDEN), temperature) - best


@triton.jit
def _above(row_ptr, V, temperature, best, low, a, b, c, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of three thresholds: how many y lie above it (and above ``low``), or, with MASS, their sum of exp(y).
    One pass over the row."""
    above_a, above_b, above_c = 0.0, 0.0, 0.0
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        weight = tl.where(y > low, tl.exp(y), 0.0) if MASS else tl.where(y > low, 1.0, 0.0)
        above_a += tl.sum(tl.where(y > a, weight, 0.0), axis=0)
        above_b += tl.sum(tl.where(y > b, weight, 0.0), axis=0)
        above_c += tl.sum(tl.where(y > c, weight, 0.0), axis=0)
    return above_a, above_b, above_c


@triton.jit
def _find_threshold(row_ptr, V, temperature, best, low, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The threshold t of a cut: exactly the logits y > t are kept. A logit is kept while the count (or MASS) of those
    above it is less than ``limit``. This number falls as y grows, so [t, high] is quartered until no float lies
    between. Invariant: at least ``limit`` lies above t, and less than ``limit`` above high. Ties are kept together,
    since they lie on the same side of any t."""
    lowest_a, _, _ = _above(row_ptr, V, temperature, best, low, low, low, low, MASS, BLOCK)
    t, high = low, tl.full((), 0.0, tl.float32)
    step = tl.where(lowest_a < limit, SEARCH_STEPS, 0)  # nothing to cut: keep all above ``low``
    while step < SEARCH_STEPS:
        quarter = (high - t) * 0.25
        a, b, c = t + quarter, t + 2.0 * quarter, t + 3.0 * quarter
        above_a, above_b, above_c = _above(row_ptr, V, temperature, best, low, a, b, c, MASS, BLOCK)
        is_done = a == t  # no float left in between
        t = tl.where(above_c >= limit, c, tl.where(above_b >= limit, b, tl.where(above_a >= limit, a, t)))
        high = tl.where(above_a < limit, a, tl.where(above_b < limit, b, tl.where(above_c < limit, c, high)))
        step = tl.where(is_done, SEARCH_STEPS, step + 1)
    return t


@triton.jit
def _kept_mass(row_ptr, V, temperature, best, low, top_k, BLOCK: tl.constexpr):
    """Sum of exp(y) above ``low``; with top_k > 0 of exactly ``top_k`` tokens: of those tied at the last place only as
    many count as fit, as in the reference, whose top-p share is of k tokens."""
    mass, count, last = 0.0, 0.0, tl.full((), 0.0, tl.float32)
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        kept = y > low
        mass += tl.sum(tl.where(kept, tl.exp(y), 0.0), axis=0)
        count += tl.sum(tl.where(kept, 1.0, 0.0), axis=0)
        last = tl.minimum(last, tl.min(tl.where(kept, y, 0.0), axis=0))
    if top_k > 0:
        mass -= tl.maximum(count - top_k.to(tl.float32), 0.0) * tl.exp(last)
    return mass


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on uint64; see `reference.uniform`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Float64 in [0, 1): the reference's SplitMix64 over seed and position."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    bits = _mix(key + (position.to(tl.uint64, bitcast=True) + 1) * golden)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _invert_cdf(row_ptr, V, temperature, best, low, uniform, BLOCK: tl.constexpr):
    """The first token whose cumulative weight among those above ``low`` exceeds ``uniform`` times the total. Two
    passes: the total, then the block in which the target lies. Block sums are float32, their sums float64."""
    total = tl.full((), 0.0, tl.float64)
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        total += tl.sum(tl.where(y > low, tl.exp(y), 0.0), axis=0).to(tl.float64)
    target = uniform * total
    before = tl.full((), 0.0, tl.float64)
    token = 0
    is_found = total != total  # a row of NaN gets token 0
    for at in range(0, V, BLOCK):
        if not is_found:
            y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
            weight = tl.where(y > low, tl.exp(y), 0.0)
            mass = tl.sum(weight, axis=0).to(tl.float64)
            index = tl.arange(0, BLOCK)
            last = tl.max(tl.where(weight > 0, index, 0), axis=0)
            if mass > 0:
                token = at + last  # stays if rounding leaves the target beyond the end
            if before + mass > target:
                reached = tl.cumsum(weight, axis=0).to(tl.float64) + before
                token = at + tl.minimum(tl.sum((reached <= target).to(tl.int32), axis=0), last)
                is_found = True
            before += mass
    return token


@triton.jit
def _mask(row_ptr, mask_ptr, V, BLOCK: tl.constexpr):
    """Set forbidden logits to -inf in place (``mask_ptr`` [W] int32, a set bit allows); returns the largest logit
    before, NaN if there was one."""
    best, is_broken = tl.full((), NEGATIVE, tl.float32), 0
    for at in range(0, V, BLOCK):
        index = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < V, other=NEGATIVE)
        best, is_broken = (
            tl.maximum(best, tl.max(x, axis=0)), tl.maximum(is_broken, tl.max((x != x).to(tl.int32), axis=0))
        )
        # other=-1: all bits set, so that nothing is stored beyond the row
        word = tl.load(mask_ptr + index // 32, mask=index < V, other=-1)
        tl.store(row_ptr + index, NEGATIVE, mask=((word >> (index % 32)) & 1) == 0)
    return tl.where(is_broken > 0, float("nan"), best)


@triton.jit
def _row_max(row_ptr, V, BLOCK: tl.constexpr):
    """``(largest logit of the row, NaN if it holds one; first token that has it)``."""
    best, is_broken, token = tl.full((), NEGATIVE, tl.float32), 0, tl.full((), 0, tl.int32)
    for at in range(0, V, BLOCK):
        index = at + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < V, other=NEGATIVE)
        is_broken = tl.maximum(is_broken, tl.max((x != x).to(tl.int32), axis=0))
        block_best = tl.max(x, axis=0)
        if block_best > best:
            token = tl.min(tl.where(x == block_best, index, V - 1), axis=0)
            best = block_best
    return tl.where(is_broken > 0, float("nan"), best), token


@triton.jit
def _gather(row_ptr, V, temperature, best, low, floor, values_ptr, ids_ptr, BLOCK: tl.constexpr):
    """Write the y above ``floor`` (>= ``low``) and their tokens to the workspace [BLOCK] float32 and int32, in token
    order; unused entries get FORBIDDEN. Returns their count (even beyond BLOCK) and mass, and the mass of all above
    ``low``."""
    count, mass, total = 0, 0.0, 0.0
    tl.store(values_ptr + tl.arange(0, BLOCK), tl.full((BLOCK,), FORBIDDEN, tl.float32))
    tl.debug_barrier()  # other threads of the program write candidates to the same entries below
    for at in range(0, V, BLOCK):
        y = _scaled(row_ptr, at, V, temperature, best, BLOCK)
        weight = tl.where(y > low, tl.exp(y), 0.0)
        total += tl.sum(weight, axis=0)
        is_in = y > floor
        added = tl.sum(is_in.to(tl.int32), axis=0)
        if added > 0:
            mass += tl.sum(tl.where(is_in, weight, 0.0), axis=0)
            place = count + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            has_room = is_in & (place < BLOCK)
            tl.store(values_ptr + place, y, mask=has_room)
            tl.store(ids_ptr + place, at + tl.arange(0, BLOCK), mask=has_room)
            count += added
    tl.debug_barrier()  # the caller reads what other threads have written
    return count, mass, total


@triton.jit
def _gather_candidates(row_ptr, V, temperature, best, low, top_k, top_p, values_ptr, ids_ptr, BLOCK: tl.constexpr):
    """Gather candidates until both cuts must fall among them, trying at most two floors. Returns whether that succeeded
    (not if there are more than BLOCK, or two floors were too high), and the mass above ``low``."""
    total, is_found, guess = 0.0, tl.full((), 0, tl.int1), 0
    floor = tl.full((), 0.0, tl.float32) - DEEP
    while guess < 2:
        floor = tl.maximum(floor, low)
        count, mass, total = _gather(row_ptr, V, temperature, best, low, floor, values_ptr, ids_ptr, BLOCK)
        # with top-k its cut decides: top-p only cuts further, among those k
        is_enough = (floor == low) | tl.where(top_k > 0, count >= top_k, mass >= top_p * total)
        is_found = is_enough & (count <= BLOCK)
        # too many already, and still more needed: no floor fits
        is_hopeless = (count > BLOCK) & (is_enough == 0)
        guess = tl.where(is_found | is_hopeless, 2, guess + 1)
        floor += tl.where(count > BLOCK, DEEPER, -DEEPER)
    return is_found, total


COLUMNS = [
    "sampled_ptr", "ids_ptr", "masks_ptr", "mask_of_row_ptr", "before_ptr",
    "temperature_ptr", "top_k_ptr",
    "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr",
]
"""Arguments that are slices of a step's upload, at any offset. Specialised on alignment, as Triton does by default,
they would need a dozen variants of the kernel, each compiled while a request waits."""


@triton.jit(
    do_not_specialize=["num_words", "has_masks", "has_before", "has_params"], do_not_specialize_on_alignment=COLUMNS
)
def _sample_kernel(
    logits_ptr, sampled_ptr, values_ptr, ids_ptr, masks_ptr, mask_of_row_ptr, before_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, row_stride, V, num_words, has_masks,
    has_before, has_params, BLOCK: tl.constexpr,
):
    """One program per row; see `SAMPLE` for the arguments. Masks, parameters and ``before`` are optional at run time,
    not compile time: one variant, compiled before the first request."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    place = tl.load(mask_of_row_ptr + row, mask=has_masks != 0, other=-1).to(tl.int64)
    before = tl.full((), 0.0, tl.float32)
    if place >= 0:
        before = _mask(row_ptr, masks_ptr + place * num_words, V, BLOCK)
    best_left, token = _row_max(row_ptr, V, BLOCK)
    if place < 0:
        before = best_left
    if has_before != 0:
        before = tl.load(before_ptr + row)
    is_broken = (before != before) | (tl.abs(before) == float("inf"))
    is_empty = (best_left != best_left) | (tl.abs(best_left) == float("inf"))
    token = token.to(tl.int64)
    temperature = tl.load(temperature_ptr + row, mask=has_params != 0, other=0.0).to(tl.float32)
    if (temperature > 0) & (best_left > NEGATIVE):
        best = tl.math.div_rn(best_left, temperature)
        top_k, top_p, min_p = (
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row).to(tl.float32), tl.load(min_p_ptr + row)
        )
        low = tl.full((), LOWEST, tl.float32)
        if min_p > 0:
            # kept are y >= log(min_p); the rest of the search keeps y > low, so low is the next float below
            floor = tl.log(min_p).to(tl.float32)
            low = tl.maximum(low, floor - tl.maximum(tl.abs(floor) * 1.2e-7, 1e-30))
        size, divisor, is_gathered = tl.full((), 0, tl.int32) + V, temperature, tl.full((), 0, tl.int1)
        if (top_k > 0) | (top_p < 1.0):
            values_ptr += row.to(tl.int64) * BLOCK
            ids_ptr += row.to(tl.int64) * BLOCK
            is_gathered, mass = _gather_candidates(
                row_ptr, V, temperature, best, low, top_k, top_p, values_ptr, ids_ptr, BLOCK
            )
            if is_gathered:  # from here on the workspace stands for the row, already scaled
                row_ptr, size = values_ptr, tl.full((), BLOCK, tl.int32)
                divisor, best = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
            if top_k > 0:
                low = _find_threshold(row_ptr, size, divisor, best, low, top_k.to(tl.float32), False, BLOCK)
            if top_p < 1.0:
                if top_k > 0:
                    mass = _kept_mass(row_ptr, size, divisor, best, low, top_k, BLOCK)
                low = _find_threshold(row_ptr, size, divisor, best, low, top_p * mass, True, BLOCK)
        uniform = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        token = _invert_cdf(row_ptr, size, divisor, best, low, uniform, BLOCK).to(tl.int64)
        if is_gathered:
            token = tl.load(ids_ptr + token).to(tl.int64)
    tl.store(sampled_ptr + row, token)
    tl.store(
        sampled_ptr + tl.num_programs(0) + row,
        tl.where(is_broken, NOT_FINITE, tl.where(is_empty, NOTHING_ALLOWED, 0)).to(tl.int64)
    )


def sample(
    logits: torch.Tensor, *, params: SampleParams | None = None, masks: torch.Tensor | None = None,
    mask_of_row: torch.Tensor | None = None, before: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `headrace.kernels.sample.SAMPLE`. One program per row; several where all rows are greedy and unmasked."""
    if params is None and masks is None and before is None:
        return sample_greedy(logits)
    num_rows, vocab_size = logits.shape
    sampled = torch.empty((2, num_rows), dtype=torch.int64, device=logits.device)
    reals, words = sampled.view(torch.float64), sampled.view(torch.int32)  # stand in for absent tensors
    # the workspace of `_gather_candidates`, only if some row has a cut
    values, ids = logits, words
    if params is not None and (params.num_ranked or params.has_top_p):
        values = torch.empty((num_rows, BLOCK), dtype=torch.float32, device=logits.device)
        ids = torch.empty((num_rows, BLOCK), dtype=torch.int32, device=logits.device)
    columns = (reals, sampled, reals, reals, sampled, sampled)
    if params is not None:
        columns = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position)
    _sample_kernel[(num_rows,)](
        logits, sampled, values, ids, words if masks is None else masks,
        words if mask_of_row is None else mask_of_row, logits if before is None else before, *columns, logits.stride(0),
        vocab_size, 0 if masks is None else masks.shape[1], int(masks is not None), int(before is not None),
        int(params is not None), BLOCK=BLOCK, num_warps=16, maxnreg=MAX_REGISTERS,
    )
    return sampled


@triton.jit
def max_or_nan(x):
    """The maximum of a block, NaN if it holds one."""
    return tl.where(tl.max((x != x).to(tl.int32), axis=0) > 0, float("nan"), tl.max(x, axis=0))


@triton.jit
def find_first(x, index, last):
    """The first index of the maximum; ``last`` where there is none (NaN)."""
    return tl.min(tl.where(x == tl.max(x, axis=0), index, last), axis=0)


@triton.jit
def combine_parts(part_values_ptr, part_ids_ptr, row, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """``(maximum over a row's parts, NaN if one is; its token)``; part results are [S, PARTS]."""
    part = tl.arange(0, BLOCK)
    x = tl.load(part_values_ptr + row * PARTS + part, mask=part < PARTS, other=NEGATIVE)
    ids = tl.load(part_ids_ptr + row * PARTS + part, mask=part < PARTS, other=0)
    first = find_first(x, part, PARTS - 1)
    return max_or_nan(x), tl.max(tl.where(part == first, ids, 0), axis=0).to(tl.int64)


@triton.jit
def _part_kernel(logits_ptr, values_ptr, ids_ptr, row_stride, V, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The maximum of BLOCK logits of a row and its token. Many programs per row: argmax of a few rows is bound by
    memory bandwidth, which one SM cannot use up."""
    row, part = tl.program_id(0), tl.program_id(1)
    index = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + index, mask=index < V, other=NEGATIVE).to(tl.float32)
    tl.store(values_ptr + row * PARTS + part, max_or_nan(x))
    tl.store(ids_ptr + row * PARTS + part, find_first(x, index, V - 1))


@triton.jit
def _combine_kernel(
    part_values_ptr, part_ids_ptr, values_ptr, ids_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_STATES: tl.constexpr,
):
    """Combine the parts of a row. With HAS_STATES ``ids_ptr`` [2, B] gets ids and states; else ``values_ptr`` the
    maxima."""
    row = tl.program_id(0)
    best, token = combine_parts(part_values_ptr, part_ids_ptr, row, PARTS, BLOCK)
    tl.store(ids_ptr + row, token)
    if HAS_STATES:
        is_broken = (best != best) | (tl.abs(best) == float("inf"))
        tl.store(ids_ptr + tl.num_programs(0) + row, is_broken.to(tl.int64))
    else:
        tl.store(values_ptr + row, best)


@triton.jit
def _share_kernel(
    part_values_ptr, part_ids_ptr, out_ptr, first, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """As `_combine_kernel`: the maximum's bits and its token, counted from ``first``, to out [B, 2] int32."""
    row = tl.program_id(0)
    best, token = combine_parts(part_values_ptr, part_ids_ptr, row, PARTS, BLOCK)
    tl.store(out_ptr + 2 * row, best.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * row + 1, (token + first).to(tl.int32))


@triton.jit
def _merge_kernel(shares_ptr, sampled_ptr, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    row, share = tl.program_id(0), tl.arange(0, BLOCK)
    at, is_there = shares_ptr + (row * SHARES + share) * 2, share < SHARES
    bits = tl.load(at, mask=is_there, other=0)
    x = tl.where(is_there, bits.to(tl.float32, bitcast=True), NEGATIVE)
    ids = tl.load(at + 1, mask=is_there, other=0)
    best, winner = max_or_nan(x), find_first(x, share, SHARES - 1)
    tl.store(sampled_ptr + row, tl.sum(tl.where(share == winner, ids, 0), axis=0).to(tl.int64))
    is_broken = (best != best) | (tl.abs(best) == float("inf"))
    tl.store(sampled_ptr + tl.num_programs(0) + row, is_broken.to(tl.int64))


def _search_parts(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Maxima [S, parts] and their tokens, and the launch arguments for combining them."""
    num_rows, vocab_size = logits.shape
    parts = ceil_div(vocab_size, BLOCK)
    part_values = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
    part_ids = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    if num_rows:
        _part_kernel[(num_rows, parts)](
            logits, part_values, part_ids, logits.stride(0), vocab_size, PARTS=parts, BLOCK=BLOCK, num_warps=8
        )
    return part_values, part_ids, {"PARTS": parts, "BLOCK": 1 << (parts - 1).bit_length(), "num_warps": 1}


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.sample.ARGMAX`: parts of a row are searched in parallel, then combined."""
    part_values, part_ids, shape = _search_parts(logits)
    values = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _combine_kernel[(logits.shape[0],)](part_values, part_ids, values, ids, HAS_STATES=False, **shape)
    return values, ids


def sample_greedy(logits: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.sample.SAMPLE_GREEDY`."""
    part_values, part_ids, shape = _search_parts(logits)
    sampled = torch.empty((2, logits.shape[0]), dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _combine_kernel[(logits.shape[0],)](
            part_values, part_ids, part_values, sampled, HAS_STATES=True, **shape
        )
    return sampled


def argmax_share(logits: torch.Tensor, first: int) -> torch.Tensor:
    """See `headrace.kernels.sample.ARGMAX_SHARE`."""
    part_values, part_ids, shape = _search_parts(logits)
    out = torch.empty((logits.shape[0], 2), dtype=torch.int32, device=logits.device)
    if logits.shape[0]:
        _share_kernel[(logits.shape[0],)](part_values, part_ids, out, first, **shape)
    return out


def merge_shares(shares: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.sample.MERGE_SHARES`."""
    sampled = torch.empty((2, shares.shape[0]), dtype=torch.int64, device=shares.device)
    if shares.shape[0]:
        count = shares.shape[1] // 2
        _merge_kernel[(shares.shape[0],)](
            shares, sampled, SHARES=count, BLOCK=1 << max(1, (count - 1).bit_length()), num_warps=1
        )
    return sampled
