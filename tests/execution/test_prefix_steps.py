"""Many decodes of a step begin with the same pages: backends are told of them, and what rows sample is the same."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driver import Driver
from test_cuda_steps import CONFIG
from tiny_checkpoint import write_tiny_checkpoint
from toy import FULL, VOCAB_SIZE, WINDOW, KeepInputs, ToyModel, toy_logits

from headrace import LLM, SamplingParams
from headrace.base.cache import CacheGroup, CacheLayout
from headrace.base.config import engine_config
from headrace.base.sampling import SamplingSpec
from headrace.base.step import PageAppend, TokenLogprobs
from headrace.execution.building import build_executor
from headrace.execution.graph_sizes import GraphSizes, bucket_sizes
from headrace.execution.runner import Runner
from headrace.layers.attention.contract import AttentionInputs
from headrace.layers.attention.reference import ReferenceAttention
from headrace.memory import prefix_groups
from tests.execution.pretended_graphs import PretendedRecorder

PAGE = 16
BEGINS = ([*range(1, 71)], [*range(20, 85)])  # of 64 tokens and more


class GroupedInputs(KeepInputs):
    prefix_members = 8


class GroupedModel(ToyModel):
    """Reads what a group has in common from the pages of its first decode alone."""

    def __init__(self):
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def _attend(self, inputs, pages, layer):
        if inputs.prefixes is not None:
            assert layer == 0, "the backend of windows has no use for it"
            groups = [group for group in inputs.prefixes.groups.tolist() if group[1]]
            self.sizes.append(tuple(sorted(count for _, count in groups)))
            table = inputs.page_table.clone()
            for first, count in groups:
                keys = inputs.prefixes.keys[first : first + count].tolist()
                assert keys == [64] * count
                table[first : first + count, : 64 // PAGE] = table[first, : 64 // PAGE]
            assert int((inputs.prefixes.keys > 0).sum()) == sum(count for _, count in groups)
            inputs = replace(inputs, page_table=table)
        return super()._attend(inputs, pages, layer)


def make_runner(max_rows: int = 12) -> tuple[Runner, GroupedModel]:
    layout = CacheLayout(PAGE, max_rows, 160, [CacheGroup(FULL, [0], 150), CacheGroup(WINDOW, [1], 150)])
    model = GroupedModel()
    runner = Runner(
        model, layout, [GroupedInputs(), KeepInputs()], num_layers=2, vocab_size=VOCAB_SIZE, max_tokens=200,
        device=torch.device("cpu"),
    )
    return runner, model


def start_behind(
    driver: Driver, row: int, leader: int, prompt: list[int], *, count: int = 64, sampling: SamplingSpec | None = None
) -> None:
    """A row that finds its first ``count`` tokens in the pages of another."""
    driver.start(row, prompt, sampling or SamplingSpec())
    for group in range(driver.num_groups):
        shared = driver.held[leader][group][: count // PAGE]
        driver.held[row][group] = list(shared)
        driver.appends.append(PageAppend(group, row, 0, list(shared)))
    driver.computed[row] = count


def group_little(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    """Steps are grouped for less than would pay."""
    for name, value in (dict(LEAST_KEYS=64, LAUNCH_KEYS=0, DECODE_KEYS=0, REST_KEYS=0) | limits).items():
        monkeypatch.setattr(prefix_groups, name, value)


@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_of_two_prompts_in_turns(is_captured: bool, monkeypatch: pytest.MonkeyPatch):
    group_little(monkeypatch, LEAST_DECODES=6)
    runner, model = make_runner()
    if is_captured:
        steps = runner.capture(GraphSizes([8, 64], []), PretendedRecorder())
        steps.record_all(lambda: None)
        assert model.sizes == [()], "of padding, in one size"
        model.sizes.clear()
    driver = Driver(runner, num_pages=150, page_size=PAGE)
    prompts = {row: [*BEGINS[row % 2][:64], *range(30 + row, 33 + 2 * row)] for row in range(12)}
    for row in (0, 1):
        driver.start(row, prompts[row], SamplingSpec())
    driver.step({0: 99, 1: 99})
    for row in range(2, 9):
        start_behind(driver, row, row % 2, prompts[row])
    driver.step(dict.fromkeys(range(2, 9), 99))
    assert not model.sizes, "beside two decodes"
    for _ in range(3):
        driver.step({})
    assert model.sizes == [(4, 5)] * 3
    for row in (9, 10, 11):  # decodes beside prompts keep their order, in which none stand side by side
        start_behind(driver, row, row % 2, prompts[row])
    driver.step(dict.fromkeys((9, 10, 11), 99))
    assert model.sizes == [(4, 5)] * 3
    for _ in range(2):
        driver.step({})
    assert model.sizes[3:] == [(6, 6)] * 2
    for row in (1, 3, 5, 7):  # two remain
        driver.held[row] = [held[64 // PAGE :] for held in driver.held[row]]  # the others still have these
        driver.release(row)
    for _ in range(3):
        driver.step({})
    assert model.sizes[5:] == [(6,)] * 3
    for row in (0, 2, 4):
        driver.held[row] = [held[64 // PAGE :] for held in driver.held[row]]
        driver.release(row)
    driver.step({})
    assert len(model.sizes) == 8, "too few"
    for row, prompt in prompts.items():
        tokens = list(prompt)
        for token in driver.output[row]:
            assert token == int(toy_logits(tokens, WINDOW.window).argmax())
            tokens.append(token)


def test_prompts_beside_rows_of_one_prompt(monkeypatch: pytest.MonkeyPatch):
    """Decodes of a step with prefill, which are not put in another order."""
    group_little(monkeypatch, LEAST_DECODES=6)
    runner, model = make_runner()
    driver = Driver(runner, num_pages=150, page_size=PAGE)
    prompts = {row: [*BEGINS[0][:64], *range(30 + row, 33 + 2 * row)] for row in range(12)}
    driver.start(0, prompts[0], SamplingSpec())
    driver.step({0: 99})
    for row in range(1, 9):
        start_behind(driver, row, 0, prompts[row])
    driver.step(dict.fromkeys(range(1, 9), 99))
    for row in (9, 10, 11):
        start_behind(driver, row, 0, prompts[row])
    driver.step({9: 99, 10: 2})
    driver.step({10: 99, 11: 99})
    assert model.sizes == [(4, 5), (5, 5)]
    for row, prompt in prompts.items():
        tokens = list(prompt)
        for token in driver.output[row]:
            assert token == int(toy_logits(tokens, WINDOW.window).argmax())
            tokens.append(token)
        assert driver.output[row]


def test_graphs_of_steps_with_prefixes_are_few():
    above = [192, 256, 320, 384, 448, 512]
    assert GraphSizes(bucket_sizes(512), []).with_prefixes == [16, 32, 64, 96, 128, *above]
    assert GraphSizes(bucket_sizes(100), []).with_prefixes == [16, 32, 64, 96, 100]
    assert GraphSizes(bucket_sizes(20), []).with_prefixes == [16, 20]
    assert GraphSizes(bucket_sizes(12), []).with_prefixes == []


@pytest.mark.parametrize("options", [{"overlap_depth": 1}, {"overlap_depth": 2}, {"kv_pages": 90}], ids=str)
def test_requests_of_an_engine(options: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Prompts behind three others, which are hit, computed twice, evicted and computed again: what is said of groups is
    true by what the device has, and the output is the same when a group reads the pages of its first decode."""
    params = [SamplingParams(max_tokens=1 + 7 * i % 29, ignore_eos=True, temperature=0.0) for i in range(80)]
    tokens, begins = random.Random(1), [random.Random(n).choices(range(3, 60), k=n) for n in (150, 200, 96)]
    prompts = [
        [*begins[i % 3][: tokens.choice((64, 80, 200, 200))], *tokens.choices(range(3, 60), k=1 + 5 * i % 40)]
        for i in range(80)
    ]
    folder, outputs = write_tiny_checkpoint(tmp_path, 5), []
    wrong: list[str] = []
    grouped = 0
    prepare = ReferenceAttention.prepare

    def prepare_by_groups(backend: ReferenceAttention, inputs: AttentionInputs) -> None:
        nonlocal grouped
        if inputs.prefixes is not None:
            table, all_keys = inputs.page_table.clone(), inputs.prefixes.keys
            for first, count in inputs.prefixes.groups.tolist():
                own = slice(first, first + count)
                keys = int(all_keys[first])
                num_pages = -(-keys // PAGE)
                if (all_keys[own] != keys).any() or (inputs.kv_lens[own] <= keys).any():
                    wrong.append(f"lengths of {count} decodes")
                if count and (table[own, :num_pages] != table[first, :num_pages]).any():
                    wrong.append(f"pages of {count} decodes")
                grouped += count
                table[own, :num_pages] = table[first, :num_pages]
            inputs = replace(inputs, page_table=table)
        prepare(backend, inputs)

    group_little(monkeypatch, LEAST_SAVED=0.05, LEAST_PART=0.3, LEAST_DECODES=1000)
    monkeypatch.setattr(ReferenceAttention, "prefix_members", 8)
    monkeypatch.setattr(ReferenceAttention, "prepare", prepare_by_groups)
    for _ in range(2):
        with LLM(str(folder), **{
            "device": "cpu", "attention_backend": "reference", "page_size": PAGE, "max_running_requests": 40,
            "kv_pages": 400, "max_step_tokens": 256, "max_model_len": 400, "skip_tokenizer": True, **options
        }) as llm:
            found = llm.generate(prompt_token_ids=prompts, sampling_params=params)
            llm.check()
            outputs.append([output.outputs[0].token_ids for output in found])
        assert (grouped > 0) == (len(outputs) == 2)
        monkeypatch.setattr(prefix_groups, "LEAST_DECODES", 8)
    assert not wrong and grouped > 300
    assert outputs[0] == outputs[1]


def run_on_gpu(folder: Path, graphs: str) -> tuple[list[list[TokenLogprobs]], int]:
    """What 70 rows behind two prompts sample in 6 steps of decodes, and in how many steps decodes were grouped."""
    executor = build_executor(engine_config(
        model=str(folder), load_format="dummy", device="cuda", kv_pages=500, page_size=PAGE, max_running_requests=72,
        max_step_tokens=2048, graphs=graphs,
    ))
    driver, sampling, grouped = Driver(executor, num_pages=500, page_size=PAGE, num_groups=1), SamplingSpec(
        num_logprobs=1
    ), 0
    begins = [random.Random(i).choices(range(500), k=384) for i in range(2)]
    prompts = [[*begins[row % 2], *random.Random(row).choices(range(500), k=1 + row)] for row in range(72)]
    found: list[list[TokenLogprobs]] = [[] for _ in prompts]
    for row in (0, 1):
        driver.start(row, prompts[row], sampling)
    for new in (range(2), range(2, 30), range(30, 60), range(60, 72), *[()] * 6):
        for row in new:
            if row > 1:
                start_behind(driver, row, row % 2, prompts[row], count=384, sampling=sampling)
        plan = driver.plan(dict.fromkeys(new, 999))
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = executor.execute(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        grouped += executor._model.runner._step.grouped is not None
        result = pending.result()
        assert not result.failed_rows
        sampled = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        for row, entry in zip(sampled, result.logprobs, strict=True):
            found[row].append(entry)
    executor.close()
    return found, grouped


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_gpu_samples_the_same(graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With groups as without, but for what rounding makes of close logits."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    together, grouped = run_on_gpu(tmp_path, graphs)
    assert grouped == 6, "beside prompts, decodes of two prompts stand in turns"
    monkeypatch.setattr(prefix_groups, "LEAST_DECODES", 1000)
    apart, grouped = run_on_gpu(tmp_path, graphs)
    assert grouped == 0
    same = 0
    for mine, its in zip(together, apart, strict=True):
        assert len(mine) == len(its) >= 6
        for a, b in zip(mine, its, strict=True):
            if a.token_id != b.token_id:
                break
            assert a.logprob == pytest.approx(b.logprob, abs=0.03)
            same += 1
    assert same > 0.8 * sum(map(len, apart))
