"""Captured steps of DeepSeek-V4 on a CPU: decodes and steps with prompts, over tensors of fixed sizes with padding, say
what steps as written say."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.base.cache import CacheSpec
from headrace.base.config import engine_config
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.graphs import DecodeGraphPath, MixedGraphPath
from headrace.execution.loading import load_model
from headrace.layers.attention.contract import AttentionInputs
from headrace.models.deepseek_v4 import backends, layout
from tests.execution.pretended_graphs import PretendedRecorder
from tests.service.test_deepseek_v4_served import (
    BASE,
    CONFIG,
    NEW_TOKENS,
    add_module,
    make_model,
    make_prompts,
    oracle_logprobs,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A saved model and prompts, of which some share beginnings of one and two pages."""
    folder = tmp_path_factory.mktemp("deepseek_v4")
    make_model().save_pretrained(folder)
    return folder, make_prompts()


def capture_all(llm: LLM, most: int) -> Counter[str]:
    """Let the steps of an engine, of at most so many tokens, run as captured ones; counts which way each went."""
    runner = llm._client._engine.executor._model.runner
    sizes = GraphSizes([2, 8, 32], [16, most // 2, most])
    runner.capture(sizes, PretendedRecorder()).record_all(lambda: None)
    taken: Counter[str] = Counter()

    def watch(path: Any) -> None:
        prepare = path.prepare

        def prepared(*about: Any) -> Any:
            launch = prepare(*about)
            taken[type(path).__name__] += launch is not None
            return launch

        path.prepare = prepared

    for path in runner.paths:
        watch(path)
    return taken


def greedy(count: int) -> SamplingParams:
    """So many tokens with their log probabilities."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)


def run(
    folder: Path, texts: list[list[int]], params: SamplingParams, options: dict[str, Any], *, is_captured: bool
) -> tuple[list[tuple[list[int], list[float]]], Counter[str]]:
    """Tokens and their log probabilities, twice: the second time behind what the first left in the prefix cache."""
    with LLM(str(folder), **BASE | options) as llm:
        taken = capture_all(llm, options["max_step_tokens"]) if is_captured else Counter()
        runs = [llm.generate(prompt_token_ids=texts, sampling_params=params) for _ in range(2)]
        llm.check()
    outputs = [o.outputs[0] for run in runs for o in run]
    return [(output.token_ids, [entry.logprob for entry in output.logprobs]) for output in outputs], taken


def compare(
    folder: Path, texts: list[list[int]], params: SamplingParams, options: dict[str, Any], *, error: float = 1e-5
) -> None:
    """Steps that are captured, all of them, and steps as written."""
    (said, taken), (expected, _) = (
        run(folder, texts, params, options, is_captured=is_captured) for is_captured in (True, False)
    )
    assert set(+taken) == {DecodeGraphPath.__name__, MixedGraphPath.__name__}, "no step ran as written"
    for (tokens, worth), (right, right_worth) in zip(said, expected, strict=True):
        assert tokens == right
        torch.testing.assert_close(torch.tensor(worth), torch.tensor(right_worth), atol=error, rtol=error)


@pytest.mark.parametrize("options", [
    {"max_step_tokens": 300},
    {"max_step_tokens": 101, "overlap_depth": 2},
    {"page_size": 128, "kv_pages": 40, "max_step_tokens": 160, "overlap_depth": 2},
    {"kv_pages": 8, "overlap_depth": 2, "max_step_tokens": 300},
    {"prefix_cache": False, "max_running_requests": 2, "max_step_tokens": 64},
], ids=str)
def test_whole_prompts_chunks_hits_and_eviction(
    served: tuple[Path, list[list[int]]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Also with two plans in flight. Some chunks score their index keys in several parts."""
    monkeypatch.setattr(backends, "SCORES_CAPTURED", 256 * 48)
    folder, prompts = served
    compare(folder, prompts, greedy(NEW_TOKENS), options)


PAGES, ROOM, REQUESTS = 5, 96, 6
"""Of a request's row of the page table; tokens and requests of a captured step."""
KINDS = [
    (backends.WindowBackend, layout.WINDOW, {"window": 16}),
    (backends.EntriesBackend, layout.ENTRIES, {"compress_ratio": 4}),
    (backends.StateBackend, layout.STATE, {"window": 8, "compress_ratio": 4}),
    (backends.StateBackend, layout.STATE, {"window": 128, "compress_ratio": 128}),
]


def describe(lengths: list[int], ends: list[int], tables: torch.Tensor, *, is_captured: bool) -> AttentionInputs:
    """A step of requests with so many tokens, the last at these positions."""
    count, starts = len(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    kv_lens = torch.tensor(ends, dtype=torch.int32)
    decodes = sum(length == 1 for length in lengths)
    if is_captured:
        behind = REQUESTS - count
        return AttentionInputs(
            ROOM, 0, [], [], ROOM, 128 * PAGES, torch.cat((starts, starts[-1:].expand(behind))),
            torch.cat((kv_lens, kv_lens.new_zeros(behind))), tables, torch.empty(0), has_dynamic_lengths=True,
        )
    return AttentionInputs(
        sum(lengths), decodes, lengths, ends, max(lengths), max(ends), starts, kv_lens, tables[:count], torch.empty(0)
    )


@pytest.mark.parametrize(("kind", "name", "shape"), KINDS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_index_tensors(kind: type[Any], name: str, shape: dict[str, int], seed: int):
    """Those of a captured step are those of the step as written, for requests of any lengths; padding reads and writes
    the null page alone."""
    draw = random.Random(seed)
    lengths = [1] * draw.randrange(4) + [draw.randrange(2, 25) for _ in range(draw.randrange(4))] or [7]
    lengths += [1] * (REQUESTS - len(lengths)) * (seed % 2)  # every request has tokens
    lengths.sort(key=lambda length: length > 1)
    ends = [draw.randrange(length, 128 * PAGES) for length in lengths]
    tables = torch.randint(1, 99, (REQUESTS, PAGES), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    spec = CacheSpec(name, 1, 32, 32, "float32", **shape)
    written, captured = (kind(spec, 128, torch.device("cpu")) for _ in range(2))
    written.prepare(describe(lengths, ends, tables, is_captured=False))
    captured.prepare(describe(lengths, ends, tables, is_captured=True))
    count = sum(lengths)
    if kind is backends.WindowBackend:
        assert torch.equal(captured.counts[:count], written.counts) and captured.counts[count:].eq(1).all()
        for numbers, right, seen in zip(captured.numbers, written.numbers, written.counts, strict=False):
            assert torch.equal(numbers[:seen], right[:seen])
        assert captured.numbers[count:].eq(0).all()
    elif kind is backends.EntriesBackend:
        own, view = captured.view, written.view
        assert torch.equal(own.visible[:count], view.visible) and own.visible[count:].eq(0).all()
        assert torch.equal(own.requests[:count], view.requests) and own.requests.max() < REQUESTS
        assert own.longest >= view.longest
    else:
        find_windows = [
            {(r, n) for r, n in zip(b.windows.requests.tolist(), b.windows.numbers.tolist(), strict=True) if n >= 0}
            for b in (captured, written)
        ]
        assert find_windows[0] == find_windows[1]
        for (tokens, rows), (few, right) in zip(captured.stores, written.stores, strict=True):
            expected = torch.zeros(ROOM, dtype=torch.int64)
            expected[few] = right
            assert tokens == slice(0, ROOM) and torch.equal(rows, expected)


def test_decodes_of_any_length_have_windows_of_one_size():
    """The kernel that lists them is compiled for their size: nothing is compiled while a short request waits."""
    tables = torch.arange(1, 1 + REQUESTS * PAGES, dtype=torch.int32).view(REQUESTS, PAGES)
    backend = backends.WindowBackend(
        CacheSpec(layout.WINDOW, 1, 32, 32, "float32", window=16), 128, torch.device("cpu")
    )
    for length in (1, 7, 16, 17, 300):
        backend.prepare(describe([1, 1], [length, length], tables, is_captured=False))
        assert backend.numbers.shape == (2, 16) and backend.counts.tolist() == [min(length, 16)] * 2
        latest = [128 + length - 1 - at for at in range(min(length, 16))]  # the pages of request 0 follow the null page
        assert backend.numbers[0, : len(latest)].tolist() == latest


@pytest.mark.parametrize(("options", "drafter"), [
    ({"max_step_tokens": 101}, {"method": "ngram", "prompt_lookup_min": 1}),
    ({"prefix_cache": False, "overlap_depth": 2, "max_step_tokens": 56}, {"method": "suffix"}),
], ids=str)
def test_drafts(served: tuple[Path, list[list[int]]], options: dict[str, Any], drafter: dict[str, Any]):
    """The windows of decodes that verify drafts have tokens of one another's, beside chunks of other prompts; drafts of
    the second time are right."""
    folder, prompts = served
    drafting = {"speculative_config": {"num_speculative_tokens": 7, **drafter}}
    compare(folder, [*prompts, [7, 8, 9, 10] * 62], greedy(40), options | drafting)


def test_the_checkpoints_own_module(served: tuple[Path, list[list[int]]], tmp_path: Path):
    """It is captured behind both kinds of steps."""
    folder, prompts = served
    add_module(folder, tmp_path)
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    compare(tmp_path, prompts, greedy(24), {"max_step_tokens": 101, "overlap_depth": 2} | drafting)


def test_caches_in_8_bits(tmp_path: Path):
    """Vectors and index keys that are packed, and queries that are rounded like keys. Products of other numbers of rows
    may differ in their last bit, which a rounding to 8 bits then makes larger; by how much is the processor's."""
    make_model(head_dim=128, qk_rope_head_dim=64, index_head_dim=64).save_pretrained(tmp_path)
    options = {"max_step_tokens": 101, "kv_dtype": "float8_e4m3fn"}
    compare(tmp_path, make_prompts(), greedy(NEW_TOKENS), options, error=3e-2)


def test_hot_slots_are_not_captured_with_prompts(served: tuple[Path, list[list[int]]]):
    """Pages of prompts are staged by lengths that the host knows."""
    folder, _ = served
    for hot_slots in (0, 64):
        with LLM(str(folder), **BASE | {"hot_slots": hot_slots}) as llm:
            found = llm._client._engine.executor._model.runner._backends
            assert all(backend.supports_dynamic_lengths for backend in found) == (not hot_slots)


def test_a_token_needs_few_of_the_experts(served: tuple[Path, list[list[int]]]):
    """Two of six, of layers that are not those of other families: by these it is decided which steps are captured."""
    folder, _ = served
    config = engine_config(model=str(folder), **BASE)
    loaded = load_model(config, torch.device("cpu"), lambda *about: None)
    experts = 6 * 3 * CONFIG["hidden_size"] * CONFIG["moe_intermediate_size"] * CONFIG["num_hidden_layers"]
    assert loaded.count_active_parameters() == loaded.num_parameters - experts * 4 // 6


@pytest.mark.cuda
def test_replays_on_a_gpu_are_near(tmp_path: Path):
    """Of the widths that have kernels of their own, caches in 8 bits; nearer to the steps as written than those are to
    float32. Every entry is chosen, as rounding would else choose others."""
    model = make_model(head_dim=512, qk_rope_head_dim=64, index_head_dim=128, index_n_heads=64, index_topk=160)
    model.save_pretrained(tmp_path)
    prompts, worth = make_prompts()[2:], {}
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, prompt_logprobs=0, ignore_eos=True)
    options = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "max_step_tokens": 100}
    for graphs in ("off", "on"):
        with LLM(str(tmp_path), **BASE | options, graphs=graphs) as llm:
            for _ in range(2):
                outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
            paths = llm._client._engine.executor._model.runner.paths
            assert any(isinstance(path, MixedGraphPath) for path in paths) == (graphs == "on")
            llm.check()
        worth[graphs] = torch.tensor([entry.logprob for o in outputs for entry in o.prompt_logprobs[1:]])
    exact = torch.cat([oracle_logprobs(model, prompt) for prompt in prompts])
    assert (worth["on"] - worth["off"]).norm() <= (worth["off"] - exact).norm()
