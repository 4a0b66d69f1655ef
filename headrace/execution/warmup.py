"""Steps before the first request: a tiny one on every device; on a GPU also the largest, to measure their memory, and
the same without launches, to find the kernels that must be compiled.

Refuses: compiling (``kernels/precompile.py``), and sizes beyond those of `_thin`, whose kernels are compiled when they
are captured.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.base.cache import NULL_PAGE
from headrace.base.errors import ModelError
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import Penalties, SamplingSpec
from headrace.base.step import PageAppend, RowDraft, RowStart, StepPlan
from headrace.base.token_ids import pack_ids
from headrace.execution.assembly import Assembly
from headrace.execution.captures import NoRecorder
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.loading import LoadedModel
from headrace.execution.runner import Runner
from headrace.kernels.attention import LONG_CONTEXT
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.kernels.precompile import precompile
from headrace.layers.media import MediaModel, finish
from headrace.layers.model import ServedModel
from headrace.layers.quantization.storage import find_stored

FIRST_PAGE = NULL_PAGE + 1
PROMPT_LEN = 3
SMALL_MEDIA = (4, 9, 16, 25, 36, 64, 100, 225)
"""Placeholders; an image often has four times as many patches."""
FEW = 33
"""Up to so many decodes the last of these lengths is as the second."""
OWN_STEP = -1
"""``step_id`` of warm-up steps, which no scheduler planned."""
MIXED_LENS = (3, 256, LONG_CONTEXT + 1)
"""Lengths of decodes beside chunks: of which attention divides no keys, divides them, and does so by other rules where
there are many decodes."""
EACH = 2
"""Layers of a kind that run where kernels are looked for: what follows one of its own kind may be fused otherwise."""

SAMPLED_WAYS = (SamplingSpec(temperature=1.0), SamplingSpec(penalties=Penalties(presence=0.5)))
"""Sampling parameters that need kernels of their own; all others branch within these kernels."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that steps take beyond what is allocated before them: ``largest`` without graphs, ``captured`` for the
    largest graph of each kind, together."""

    largest: int = 0
    captured: int = 0


def prepare_steps(assembly: Assembly) -> StepBytes:
    """Compile for the first steps, the largest ones and those with graphs, unless that was done before on this machine.
    Returns what the largest steps take; a run without launches allocates the same and measures it as well."""
    measured: list[StepBytes] = []
    config, loaded = assembly.config, assembly.loaded
    # what decides which kernels run: weights' and drafters' shapes, and what layers do beside
    about = (
        config.scheduler, config.cache, config.device, loaded.source.config, str(loaded.dtype),
        config.speculation.options, config.adapters.num_slots, config.adapters.max_lora_rank,
        config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size,
        config.parallel.enable_expert_parallel, config.parallel.data_parallel_size,
        config.parallel.enable_eplb, config.parallel.eplb_config, _describe_stored(loaded), _digest_own(),
    )
    precompile(
        lambda: measured.append(_run_steps(assembly)), msgspec.json.encode(about).decode(), assembly.device
    )
    found = measured[0] if measured else measure_steps(assembly)
    _stage_loads(assembly)
    return found


@cache
def _digest_own() -> str:
    """Of what is run here: another version may find more kernels."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def _stage_loads(assembly: Assembly) -> None:
    """Memory and kernels of loads of adapters."""
    banks = assembly.loaded.model.adapters
    if banks is not None and assembly.device.type == "cuda":
        banks.stage_loads()


def _describe_stored(loaded: LoadedModel) -> list[str]:
    """Weights in codes, and the products chosen for them: kernels beside them depend on both."""
    stored = [own for model in loaded.models for own in find_stored(model) if isinstance(own, CodedWeight)]
    return sorted({f"{own.shape} {own.plan.steps}" for own in stored})


@contextmanager
def few_layers(model: ServedModel) -> Iterator[None]:
    """A context in which only the first `EACH` layers of each kind, and the ends of the model, compute anything."""
    seen: Counter[Hashable] = Counter()
    layers = list(model.get_submodule("layers").children()) if model.layer_kinds else []
    left_out = []
    for i, (layer, kind) in enumerate(zip(layers, model.layer_kinds, strict=True)):
        seen[kind] += 1
        if seen[kind] > EACH and EACH <= i < len(layers) - EACH and "forward" not in vars(layer):
            vars(layer)["forward"] = _do_nothing
            left_out.append(layer)
    try:
        yield
    finally:
        for layer in left_out:
            del vars(layer)["forward"]


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


@torch.inference_mode()
def _run_steps(assembly: Assembly) -> StepBytes:
    """Run each kind of step once, the largest ones with all layers."""
    _stage_loads(assembly)
    measured = measure_steps(assembly)
    with few_layers(assembly.loaded.model):
        _run_small_steps(assembly)
    return measured


def _run_small_steps(assembly: Assembly) -> None:
    """Steps of one request, and those that are captured."""
    runner = assembly.build_small_runner()
    is_pooling = assembly.is_pooling
    for sampling in (SamplingSpec(), *(() if is_pooling else SAMPLED_WAYS)):
        run_tiny_steps(runner, is_pooling=is_pooling, sampling=sampling)
    for slot in _adapter_slots(assembly):
        run_tiny_steps(runner, is_pooling=is_pooling, adapter_slot=slot)
    if assembly.has_graphs:
        runner.capture(_thin(assembly.graph_sizes()), NoRecorder()).record_all(lambda: None)
    runner.detach()
    media = assembly.loaded.model.media
    if media is not None:
        _run_small_media(media, assembly.config.scheduler.max_encoder_tokens or 0)
    runner = assembly.build_small_runner()  # which replays nothing
    run_mixed_steps(runner, assembly.max_step_tokens, is_pooling=is_pooling)
    runner.detach()


def _run_small_media(media: MediaModel, most: int) -> None:
    """Encode an item of each size at which products of few rows change; `_measure_encoder` has the smallest."""
    known: set[tuple[torch.Size, ...]] = set()
    for size in SMALL_MEDIA:
        items = media.example(size) if size <= most else []
        shapes = tuple(array.shape for item in items for array in item.arrays.values())
        if items and shapes not in known:  # of families with one size of images all are the same
            known.add(shapes)
            finish(media.encode(items))


def run_mixed_steps(runner: Runner, max_tokens: int, *, is_pooling: bool = False) -> None:
    """Steps of one chunk and decodes that take no graph: those too large for one, and all before theirs is recorded.
    They have any number of tokens, by which products choose kernels, and of decodes, by which attention does."""
    longest = runner.layout.max_model_len - 1
    most = 0 if is_pooling else min(runner.layout.max_rows - 1, max_tokens - 1)
    short, usual, long = (min(length, longest) for length in MIXED_LENS)
    pairs = _mix(most, max_tokens)
    shapes = [(count, tokens, usual) for count, tokens in pairs]
    shapes += [(count, tokens, short) for count, tokens in pairs[:1]]
    shapes += [(count, tokens, long) for count, tokens in pairs if count > FEW]
    spec, pooling = SamplingSpec(), PoolingSpec() if is_pooling else None
    for count, tokens, length in shapes:
        rows, known, chunk = list(range(count + 1)), pack_ids([0] * length), min(tokens - count, longest)
        starts = [RowStart(row, "mixed", known, length, spec) for row in rows[:count]]
        starts.append(RowStart(count, "mixed", pack_ids([0] * chunk), chunk, spec, pooling))
        runner.execute(StepPlan(
            OWN_STEP, count, rows, [length] * count + [0], [1] * count + [chunk],
            [1] * count + [int(not count and not is_pooling)], starts=starts, last_tokens=[0] * count,
        )).result()
        runner.execute(StepPlan(OWN_STEP, 0, [], [], [], [], releases=rows)).result()


def _mix(most_decodes: int, max_tokens: int) -> list[tuple[int, int]]:
    """``(decodes, tokens)`` of steps in which each number at which kernels change is met once, of both."""
    tokens = [size for size in _changes(max_tokens) if size > 1]
    found = []
    for count in _changes(most_decodes, FEW + 1):
        found.append((count, next((size for size in tokens if size > count), count + 1)))
        tokens = [size for size in tokens if size != found[-1][1]]
    return [*found, *((0, size) for size in tokens)]


FEW_TOKENS = 8
"""Of a request among many in a step with adapters."""


def _changes(most: int, *others: int) -> list[int]:
    """Powers of two up to ``most``, the numbers behind them, ``others`` and ``most``."""
    powers = [2**i for i in range(most.bit_length())]
    return sorted({size for size in (*powers, *(size + 1 for size in powers), *others, most) if 0 < size <= most})


def _adapter_slots(assembly: Assembly) -> tuple[int, ...]:
    """One of each kind: among the first, which take other kernels, and behind them."""
    banks = assembly.loaded.model.adapters
    return () if banks is None else (0, banks.num_slots - 1)[: banks.num_captured]


def _thin(sizes: GraphSizes) -> GraphSizes:
    """The sizes at which kernels change: powers of two and behind them, all of the small ones, and the ends. Steps of
    other numbers of tokens are run without a graph (`run_mixed_steps`), as they are with lazy graphs."""
    largest = sizes.decodes[-1]
    decodes = [size for size in sizes.decodes if size & (size - 1) == 0 or size < 32]
    behind = [2**i + 1 for i in range(4, largest.bit_length()) if 2**i < largest]
    return GraphSizes(sorted({*decodes, *behind, largest}), sorted({*sizes.tokens[:1], *sizes.tokens[-1:]}))


def measure_steps(assembly: Assembly) -> StepBytes:
    """Run the largest steps over two pages per group and measure their memory; torch's allocator then has blocks of
    these sizes. Zeros on a CPU, where nothing is reserved for activations."""
    device = assembly.device
    if device.type != "cuda":
        return StepBytes()
    runner = assembly.build_small_runner()
    largest = measure_peak(lambda: _run_largest_steps(runner, assembly), device)
    media, most = assembly.loaded.model.media, assembly.config.scheduler.max_encoder_tokens
    if media is not None and most:
        # Before the step's own work, whose memory it uses. What is encoded in pieces stays beside other steps.
        encoding, kept = _measure_encoder(media, most, device)
        largest = max(largest + kept, encoding)
    if not assembly.has_graphs:
        return StepBytes(largest)
    sizes = assembly.graph_sizes()
    # Without recording (`NoRecorder`): the work allocates the same, outside of the graphs' pool.
    ends = (GraphSizes(sizes.decodes[-1:], []), GraphSizes([], sizes.tokens[-1:]))
    with torch.inference_mode():
        captured = sum(_measure_captured(runner, end, device) for end in ends)
    return StepBytes(largest, captured)


def _measure_captured(runner: Runner, sizes: GraphSizes, device: torch.device) -> int:
    """Peak bytes of capturing the largest step, the buffers that it reads included."""
    return measure_peak(lambda: runner.capture(sizes, NoRecorder()).record_largest(), device)


def run_tiny_steps(
    runner: Runner, *, is_pooling: bool = False, sampling: SamplingSpec | None = None, adapter_slot: int = -1
) -> None:
    """Prefill and decode one request (with ``is_pooling`` prefill alone), greedily by default, then give its row back;
    raises `ModelError` when the model's results are not finite."""
    layout = runner.layout
    num_pages = -(-(PROMPT_LEN + 1) // layout.page_size)
    # A small runner has one page per group besides the null page, where the rest of a prompt then goes.
    pages = [
        FIRST_PAGE + i if FIRST_PAGE + i < group.num_pages else NULL_PAGE
        for group in layout.groups
        for i in range(num_pages)
    ]
    appends = [PageAppend(g, 0, 0, pages[g * num_pages : (g + 1) * num_pages]) for g in range(len(layout.groups))]
    start = RowStart(
        0, "warm-up", pack_ids([0] * PROMPT_LEN), PROMPT_LEN, sampling or SamplingSpec(),
        PoolingSpec() if is_pooling else None, adapter_slot,
    )
    prefill = StepPlan(OWN_STEP, 0, [0], [0], [PROMPT_LEN], [int(not is_pooling)], starts=[start], appends=appends)
    guess = RowDraft(0, PROMPT_LEN, [0])  # verified by no step: placing it has a kernel of its own
    decodes = [] if is_pooling else [
        StepPlan(OWN_STEP, 1, [0], [PROMPT_LEN], [1], [1], last_tokens=[0], drafts=[guess])
    ]
    for plan in (prefill, *decodes, StepPlan(OWN_STEP, 0, [], [], [], [], releases=[0])):
        result = runner.execute(plan).result()
        if result.failed_rows:
            raise ModelError(
                f"the first step of the model failed: {result.failed_rows[0][1]}; are its weights sound, and its dtype "
                "wide enough?"
            )


def _run_largest_steps(runner: Runner, assembly: Assembly) -> None:
    """One step of as many requests as possible, all sampling at random, and one of the longest, of the base model and
    where adapters are served of these, also of a few tokens each, as prompts take other kernels than many requests.
    No pages are appended: they read and write the null page only, so two pages per group are enough. Rows are started
    again and never released; the runner is thrown away."""
    layout, max_tokens, is_pooling = runner.layout, assembly.max_step_tokens, assembly.is_pooling
    spec = SamplingSpec(temperature=1.0, top_p=0.9, num_logprobs=1)
    pooling = PoolingSpec() if is_pooling else None
    counts = (min(layout.max_rows, max_tokens), min(layout.max_rows, -(-max_tokens // layout.max_model_len)))
    adapters = _adapter_slots(assembly)
    sizes = [(count, min(max(1, max_tokens // count), layout.max_model_len)) for count in counts]
    short = min(FEW_TOKENS, sizes[0][1])
    for (num_rows, length), slot in (*product(sizes, (-1, *adapters)), *product([(counts[0], short)], adapters)):
        rows, prompt = list(range(num_rows)), pack_ids([0] * length)
        starts = [RowStart(row, "measure", prompt, length, spec, pooling, slot) for row in rows]
        samples = [int(not is_pooling)] * num_rows
        plan = StepPlan(OWN_STEP, 0, rows, [0] * num_rows, [length] * num_rows, samples, starts=starts)
        runner.execute(plan).result()


@torch.inference_mode()
def _measure_encoder(media: MediaModel, num_tokens: int, device: torch.device) -> tuple[int, int]:
    """Bytes that encoding as much as one step may takes, and what of them stays between pieces, beside other steps;
    before it an item as small as can be, for which other kernels are compiled."""
    finish(media.encode(media.example(1)))
    kept, before = 0, torch.cuda.memory_allocated(device)

    def encode() -> None:
        nonlocal kept
        for _ in media.encode(media.example(num_tokens)):
            kept = max(kept, torch.cuda.memory_allocated(device) - before)

    return measure_peak(encode, device), kept


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that ``run`` has at a time beyond what is allocated now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
