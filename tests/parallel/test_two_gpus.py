"""Two GPUs compute what one does, by own collectives: tokens in float32, in graphs and without."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from execution.tiny_checkpoint import write_tiny_checkpoint
from parallel import test_ranked_adapters as ranked_adapters
from parallel.test_narrowing import write
from parallel.test_tensor_parallel import DEEPSEEK_V4
from safetensors.torch import load_file, save_file
from service import random_models

from headrace import LLM, SamplingParams
from headrace.parallel.limits import LEAST_SLICE_BYTES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FAMILIES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")


def draw(family: str) -> dict[str, Any]:
    """A random configuration with head dims that GPU backends serve."""
    for seed in range(10_000):
        config = random_models.draw_config(random.Random(seed))
        heads = config["num_attention_heads"]
        if config["architectures"] == [family] and heads >= 4 and 128 % heads == 0:
            latent = family.startswith("Deepseek")
            return config if latent else {**config, "head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
    raise AssertionError(family)


def generate(folder: Path, *, device: str = "cuda", **options: Any) -> list[list[int]]:
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = [[(7 * i * j + 3) % vocab for j in range(5 + 30 * i)] for i in range(1, 6)]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=4, detokenize=False)
        for temperature in (0.0, 0.0, 0.8, 0.0, 0.0)
    ]
    with LLM(
        str(folder), skip_tokenizer=True, dtype="float32", device=device, kv_pages=256, max_step_tokens=64, **options
    ) as llm:
        rounds = [llm.generate(prompt_token_ids=prompts, sampling_params=params) for _ in range(2)]
        if "data_parallel_size" not in options:  # else engines are in other processes
            llm.check()
    return [output.outputs[0].token_ids for outputs in rounds for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_gpu(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Weights come from a file, of which each rank copies its part."""
    write(tmp_path, draw(family))
    alone = generate(tmp_path)
    capfd.readouterr()
    assert generate(tmp_path, tensor_parallel_size=2) == alone
    told = [line for line in capfd.readouterr().err.splitlines() if "collectives" in line]
    assert len(told) == 1 and "own collectives" in told[0], "one line of the ranks' log says which serve"
    if family in random_models.MIXTURES:
        assert generate(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True) == alone


@pytest.mark.parametrize(("family", "options"), [
    ("LlamaForCausalLM", {"pipeline_parallel_size": 2}), ("DeepseekV3ForCausalLM", {"pipeline_parallel_size": 2}),
    ("LlamaForCausalLM", {"data_parallel_size": 2, "data_parallel_policy": "round-robin"}),
    (
        "DeepseekV3ForCausalLM",
        {"data_parallel_size": 2, "data_parallel_policy": "round-robin", "enable_expert_parallel": True},
    ),
], ids=["stages", "stages of latents", "replicas", "replicas that divide experts"])
def test_stages_and_replicas_say_what_one_gpu_says(family: str, options: dict[str, Any], tmp_path: Path):
    write(tmp_path, draw(family))
    assert generate(tmp_path, **options) == generate(tmp_path)


def test_adapters_on_two_gpus(tmp_path: Path):
    """In graphs, of several ranks and DoRA, in turns in few slots."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = write_tiny_checkpoint(tmp_path / "base", 5, **shape)
    for seed, name in enumerate(("plain", "other", "dora"), 1):
        ranked_adapters.write_adapter(base, tmp_path / name, seed, **({"use_dora": True} if name == "dora" else {}))
    options = {**ranked_adapters.OPTIONS, "model": str(base), "device": "cuda", "page_size": None}
    answers = []
    for size in (1, 2):
        with LLM(**options, tensor_parallel_size=size) as llm:
            answers.append(ranked_adapters.generate(llm, base))
    ranked_adapters.compare(*answers)


def test_the_second_gpu_alone(tmp_path: Path):
    """Everything is on the device that was named, in all threads."""
    write(tmp_path, draw("LlamaForCausalLM"))
    alone, before = generate(tmp_path), torch.cuda.memory_allocated(0)
    assert generate(tmp_path, device="cuda:1") == alone
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_large_steps_in_slices(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Prompts of so many tokens that their rows go through the layers in two slices: sums beside products."""
    hidden, length = 512, 3000
    config = draw(family) | {
        "hidden_size": hidden, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "num_hidden_layers": 3,
    }
    del config["sliding_window"], config["layer_types"]
    write(tmp_path, config)
    prompts = [random.Random(seed).choices(range(3, config["vocab_size"]), k=length) for seed in range(3)]
    assert 3 * length * hidden * 4 >= 2 * LEAST_SLICE_BYTES
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, detokenize=False, logprobs=0)
    options = dict(
        skip_tokenizer=True, dtype="float32", device="cuda", kv_pages=1024, max_step_tokens=16384, max_model_len=4096
    )

    def generate_rounds(**more: Any) -> tuple[list[list[int]], torch.Tensor]:
        with LLM(str(tmp_path), **options, **more) as llm:
            outputs = []
            for _ in range(3):
                llm.reset_prefix_cache()
                outputs += llm.generate(prompt_token_ids=prompts, sampling_params=params)
            llm.check()
        choices = [output.outputs[0] for output in outputs]
        return [choice.token_ids for choice in choices], torch.tensor([choice.cumulative_logprob for choice in choices])

    tokens, logprobs = generate_rounds()
    capfd.readouterr()
    ranked_tokens, ranked_logprobs = generate_rounds(tensor_parallel_size=2)
    assert ranked_tokens == tokens
    torch.testing.assert_close(ranked_logprobs, logprobs, atol=1e-3, rtol=1e-3)
    assert "large sums beside products" in capfd.readouterr().err


@pytest.mark.parametrize("own", [{}, {"enable_expert_parallel": True}], ids=str)
def test_streams_of_deepseek_v4(own: dict[str, Any], tmp_path: Path):
    """Hyper-connections add up over ranks in their own kernel, which takes bfloat16 and whole warps of columns."""
    write(tmp_path, {**DEEPSEEK_V4, "hidden_size": 512})
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("tid2eid")]:  # all zero in a new model of transformers
        tensors[name] = torch.stack([torch.randperm(DEEPSEEK_V4["n_routed_experts"])[:2] for _ in range(256)])
    save_file(tensors, tmp_path / "model.safetensors")
    prompts = [[(7 * i * j + 3) % 256 for j in range(length)] for i, length in enumerate((2, 5, 9, 30, 200), 1)]
    params = SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=0.0, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    base = dict(skip_tokenizer=True, dtype="bfloat16", device="cuda", kv_pages=64, prefix_cache=False)

    def answer(**options: Any) -> list[Any]:
        with LLM(str(tmp_path), **base, **options) as llm:
            outputs = [llm.generate(prompt_token_ids=[prompt], sampling_params=params)[0] for prompt in prompts]
            llm.check()
        return outputs

    pairs = list(zip(answer(), answer(tensor_parallel_size=2, **own), strict=True))
    rated = [[[each.logprob for each in output.prompt_logprobs[1:]] for output in pair] for pair in pairs]
    alike = 0
    for one, two in ((one.outputs[0], two.outputs[0]) for one, two in pairs):
        for token, other, mine, theirs in zip(one.token_ids, two.token_ids, one.logprobs, two.logprobs, strict=True):
            if token != other:  # roundings that differ may decide a tie, and what follows is another text
                break
            alike += 1
            rated.append([[mine.logprob], [theirs.logprob]])
    mine, theirs = (torch.tensor([value for pair in rated for value in pair[i]]) for i in (0, 1))
    # bfloat16 keeps 1 % of such logits; the part of one rank alone is another model
    assert alike > 20 and (mine - theirs).abs().mean() < 0.03 * theirs.abs().mean()


def test_a_step_without_graphs(tmp_path: Path):
    write(tmp_path, draw("LlamaForCausalLM"))
    assert generate(tmp_path, tensor_parallel_size=2, graphs="off") == generate(tmp_path, graphs="off")
