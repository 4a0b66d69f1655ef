"""Real families, tiny and random, through the runner: greedy tokens equal those of transformers' generate."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import Driver
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from headrace.base.cache import CacheLayout, group_layers
from headrace.base.config import CacheConfig
from headrace.base.sampling import SamplingSpec
from headrace.execution.assembly import choose_backends
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.inputs import InputBuilder
from headrace.execution.runner import Runner
from headrace.layers.attention.contract import AttentionGeometry
from headrace.layers.attention.triton import TritonAttention
from headrace.layers.build import Build
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.sites import AdapterBanks
from headrace.memory.plan import CacheDemand, plan_cache
from headrace.models.catalog import find_family

CPU = torch.device("cpu")
VOCAB_SIZE, PAGE_SIZE, NUM_PAGES, NEW_TOKENS = 128, 4, 90, 12
SHAPE = dict(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
    max_position_embeddings=96, initializer_range=0.4, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    pad_token_id=0,
)
CONFIGS = {
    "llama": (LlamaConfig(**SHAPE), "LlamaForCausalLM"),
    "gemma3": (
        Gemma3TextConfig(
            **SHAPE, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=8
        ),
        "Gemma3ForCausalLM"
    ),
}


def build(name: str, adapters: BankSizes | None = None) -> tuple[torch.nn.Module, Runner]:
    """transformers' model, and a runner over ours with the same weights."""
    config, architecture = CONFIGS[name]
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    family = find_family(architecture)
    spec = family.read_config({**config.to_dict(), "architectures": [architecture]})
    where = Build(device=CPU, dtype=torch.float32, adapters=adapters)
    ours = family.build_model(spec, where)
    if adapters is not None:
        ours.adapters = AdapterBanks(ours, ours.find_adapter_sites(), adapters, where.step)
    ours.load_weights(theirs.state_dict().items())
    specs = family.cache_specs(spec, "float32")
    chosen = choose_backends((ours,), group_layers(specs), where, CacheConfig(page_size=PAGE_SIZE), "auto")
    demand = CacheDemand(group_layers(specs), PAGE_SIZE, 96, is_len_fixed=True, max_step_tokens=64, max_rows=4)
    plan = plan_cache(demand, CacheConfig(kv_pages=NUM_PAGES, window_share=1.0), 0)
    layout = CacheLayout(chosen.page_size, 4, plan.max_model_len, plan.groups)
    return (
        theirs,
        Runner(ours, layout, chosen.backends, num_layers=len(specs), vocab_size=VOCAB_SIZE, max_tokens=64, device=CPU)
    )


@torch.inference_mode()
def generate(theirs: torch.nn.Module, prompt: list[int]) -> list[int]:
    out = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, len(prompt):].tolist()


class PretendedRecorder:
    """A graph is the work itself."""

    num_recorded = 0

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        self.num_recorded += 1
        return work


def open_steps(runner: Runner, recorder: PretendedRecorder) -> None:
    """Let every step run as one that is captured, padding and all, on the kernels that know their spans from the
    device."""
    geometry = AttentionGeometry("cpu", "float32", "float32", (0, 0), 4, 2, 8, 8, PAGE_SIZE)
    runner._backends = [TritonAttention(geometry, CPU) for _ in runner._backends]
    adapters = runner._inputs.adapters
    runner._inputs = InputBuilder(runner.layout, runner._rows, runner._tables, runner._backends, 64, runner._media)
    runner._inputs.adapters = adapters
    runner.capture(GraphSizes([4], [4, 8, 40]), recorder)


@pytest.mark.interpreted
@pytest.mark.parametrize(("moment", "num_recorded"), [("wanted", 3), ("idle", 4)])
def test_captured_steps_compute_the_same(moment: str, num_recorded: int):
    theirs, runner = build("gemma3")
    recorder = PretendedRecorder()
    open_steps(runner, recorder)
    prompts = {row: random.Random(row).choices(range(1, VOCAB_SIZE), k=length) for row, length in enumerate((5, 20, 1))}
    driver = Driver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    for row, prompt in prompts.items():
        driver.start(row, prompt, SamplingSpec())
    for chunks in ({0: 8, 1: 6}, {1: 12, 2: 1}, {1: 2}, {}):
        driver.step(chunks)
        if moment == "idle":
            runner.record_next()
    assert recorder.num_recorded == num_recorded
    for row, count in ((0, 4), (1, 2), (2, 3)):
        assert driver.output[row] == generate(theirs, prompts[row])[:count]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers(name: str):
    theirs, runner = build(name)
    prompts = {
        row: random.Random(row).choices(range(1, VOCAB_SIZE), k=length) for row, length in enumerate((5, 33, 17, 1))
    }
    driver = Driver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    driver.start(0, prompts[0], SamplingSpec())
    driver.start(1, prompts[1], SamplingSpec(num_prompt_logprobs=0))
    driver.step({0: 8, 1: 6})
    driver.start(2, prompts[2], SamplingSpec())
    driver.start(3, prompts[3], SamplingSpec())
    prompt_logprobs = {}
    for chunks in ({1: 9, 2: 3}, {1: 1, 3: 1}, {2: 16, 1: 16}, {1: 40}, *[{}] * NEW_TOKENS):
        for part in driver.step(chunks).prompt_logprobs:
            prompt_logprobs |= {part.start + i: entry.logprob for i, entry in enumerate(part.entries)}
    for row, prompt in prompts.items():
        assert driver.output[row][:NEW_TOKENS] == generate(theirs, prompt)
    assert len({token for output in driver.output.values() for token in output}) > 10, (
        "a model that repeats itself proves little"
    )
    oracle = theirs(torch.tensor([prompts[1]])).logits[0].log_softmax(-1).detach()
    assert sorted(prompt_logprobs) == list(range(6 + 1, 33))
    for position, logprob in prompt_logprobs.items():
        assert logprob == pytest.approx(float(oracle[position - 1, prompts[1][position]]), abs=1e-4)


def test_rows_agree_with_themselves_alone_under_sampling():
    _, runner = build("llama")
    spec = SamplingSpec(temperature=1.0, top_k=20, top_p=0.9, seed=7)
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=9)
    alone = Driver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    alone.start(0, prompt, spec)
    for _ in range(10):
        alone.step({0: 64})
    alone.release(0)
    crowd = Driver(runner, seed=5, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    crowd.start(3, prompt, spec)
    for row in (0, 1, 2):
        crowd.start(
            row, random.Random(row + 50).choices(range(VOCAB_SIZE), k=10 + row),
            SamplingSpec(temperature=0.5 * row, seed=row, top_p=0.7)
        )
    for _ in range(14):
        crowd.step({row: 3 for row in range(4)})
    assert crowd.output[3][:10] == alone.output[0]
