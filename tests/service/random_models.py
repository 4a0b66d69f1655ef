"""Small models of any family and shape, and engines and requests for them, all sampled from a seed. Torch-free but for
scores."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace import LLM, SamplingParams
from headrace.service.client.outputs import GenerationOutput

MAX_MODEL_LEN = 320
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257)
MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM")
DENSE = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", "Olmo2ForCausalLM",
    "GraniteForCausalLM", "Glm4ForCausalLM", "GlmForCausalLM",
)


@dataclass(frozen=True)
class Case:
    """A configuration, options of the engine, and requests: prompts with the same beginnings, and what is asked of
    each."""

    config: dict[str, Any]
    options: dict[str, Any]
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def loses_nothing(self) -> bool:
        """Whether all that differs is the order of sums."""
        options = self.options
        return (
            options["dtype"] == "float32" and options.get("quantization", "none") == "none"
            and options["kv_dtype"] == "auto"
        )

    @property
    def is_mixture(self) -> bool:
        return self.config["architectures"][0] in MIXTURES


def draw_case(seed: int) -> Case:
    """The same for the same seed."""
    draw = random.Random(seed)
    config = draw_config(draw)
    count = draw.choice((1, 3, 7))
    shared = [draw.randrange(3, config["vocab_size"]) for _ in range(max(LENGTHS))]
    lengths = [draw.choice(LENGTHS if count < 7 else LENGTHS[:-2]) for _ in range(count)]
    cuts = [draw.randrange(length) for length in lengths]
    prompts = [
        shared[:cut] + [draw.randrange(3, config["vocab_size"]) for _ in range(length - cut)] for length,
        cut in zip(lengths, cuts, strict=True)
    ]
    params = [
        SamplingParams(
            temperature=0, max_tokens=draw.choice((1, 2, 9)), ignore_eos=True, logprobs=draw.choice((None, 0)),
            prompt_logprobs=draw.choice((None, 0)), n=draw.choice((1, 1, 2)),
        )
        for _ in prompts
    ]
    return Case(config, draw_options(draw, config), prompts, params)


def draw_config(draw: random.Random) -> dict[str, Any]:
    """A config.json; widths are seldom what kernels like best."""
    architecture = draw.choice(DENSE * 2 + MIXTURES)
    num_heads = draw.choice((1, 2, 3, 4, 5, 6, 8, 9))
    head_dim = draw.choice((32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 256))
    width, num_layers = draw.choice((32, 64, 72, 80, 136, 200)), draw.choice((1, 2, 3))
    types = [draw.choice(("sliding_attention", "full_attention")) for _ in range(num_layers)]
    config: dict[str, Any] = {
        "architectures": [architecture], "vocab_size": draw.choice((97, 131, 200, 256, 515)), "hidden_size": width,
        "head_dim": head_dim,
        "intermediate_size": draw.choice((40, 48, 63, 64, 100, 257)), "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": draw.choice([heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "initializer_range": width**-0.5, "tie_word_embeddings": draw.random() < 0.5,
        "bos_token_id": 1, "eos_token_id": 2,
        "attention_bias": draw.random() < 0.3, "mlp_bias": draw.random() < 0.3,
        "hidden_act": draw.choice(("silu", "gelu_pytorch_tanh")),
        "sliding_window": draw.choice((3, 16, 17, 33, 100)), "layer_types": types,
        "use_sliding_window": draw.random() < 0.5,
    }
    return config | {
        "GraniteForCausalLM": {
            "embedding_multiplier": 3.0, "residual_multiplier": draw.choice((1.0, 0.3)), "attention_multiplier": 0.1,
            "logits_scaling": 2.0
        },
        "Gemma3ForCausalLM": {
            "query_pre_attn_scalar": head_dim, "final_logit_softcapping": draw.choice((None, 5.0)),
            "hidden_activation": "gelu_pytorch_tanh"
        },
        "Glm4ForCausalLM": {"partial_rotary_factor": 0.5},
        "GlmForCausalLM": {"partial_rotary_factor": draw.choice((0.5, 1.0))},
        "Phi3ForCausalLM": {"sliding_window": draw.choice((None, 17))},
        "MistralForCausalLM": {"sliding_window": draw.choice((None, 5, 64))},
        "MixtralForCausalLM": {"num_local_experts": draw.choice((2, 5)), "num_experts_per_tok": draw.choice((1, 2))},
        "Qwen3MoeForCausalLM": {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": draw.choice((24, 36, 40)),
            "norm_topk_prob": draw.random() < 0.5
        },
        "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_act": "silu"},
        "DeepseekV3ForCausalLM": {
            "num_key_value_heads": num_heads, "kv_lora_rank": draw.choice((16, 24)), "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8, "v_head_dim": draw.choice((8, 10)),
            "q_lora_rank": draw.choice((None, 12)), "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": draw.choice((20, 24)),
            "first_k_dense_replace": draw.choice((0, 1)), "n_group": 2, "topk_group": 1, "hidden_act": "silu",
            "attention_bias": False,
        },
    }.get(architecture, {})


def draw_options(draw: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """How to serve it: every form of weights and cache, large and small pages and steps, one or two threads."""
    page_size = draw.choice((1, 4, 8, 16, 16, 32, 128))
    latent = config["architectures"][0].startswith("Deepseek")
    return {
        "page_size": page_size, "max_step_tokens": draw.choice((8, 17, 64, 300, 1024)), "threads": draw.choice((1, 2)),
        "prefix_cache": draw.random() < 0.8,
        "overlap_depth": draw.choice((1, 2)), "max_running_requests": draw.choice((1, 3, 64)),
        "dtype": draw.choice(("float32", "float32", "bfloat16")),
        "quantization": draw.choice(("none", "none", "stored", "int8", "int4", "w8a8")),
        "kv_dtype": "auto" if latent else draw.choice(("auto", "auto", "int8")),
        "kv_pages": draw.choice((1, 8)) * (MAX_MODEL_LEN // page_size + 8),
    }


def open_model(case: Case, folder: Path, **changes: Any) -> LLM:
    """Random weights, the same each time."""
    (folder / "config.json").write_text(json.dumps(case.config))
    options = case.options | changes
    return LLM(
        str(folder), load_format="dummy", device="cpu", skip_tokenizer=True, max_model_len=MAX_MODEL_LEN, seed=1,
        **options
    )


def run_case(case: Case, folder: Path) -> list[GenerationOutput]:
    """All requests twice, the second time over what is cached."""
    with open_model(case, folder) as llm:
        outputs = [
            output
            for _ in range(2)
            for output in llm.generate(prompt_token_ids=case.prompts, sampling_params=case.params)
        ]
        llm.check()
        assert llm.stats().num_used_pages == 0
    for output, params in zip(outputs, case.params * 2, strict=True):
        assert [len(choice.token_ids) for choice in output.outputs] == [params.max_tokens] * params.n
    return outputs


def plain_options(case: Case) -> dict[str, Any]:
    """As simple as can be: requests one after the other, each prompt whole."""
    return {
        "max_running_requests": 1, "overlap_depth": 1, "prefix_cache": False, "max_step_tokens": 1024, "page_size": 16,
        "kv_pages": 200, "attention_backend": "reference"
    }


def find_distances(case: Case, outputs: list[GenerationOutput], folder: Path) -> torch.Tensor:
    """Against an engine that reads prompts with their outputs: how far each log-probability is from that one's, and how
    much more likely than the sampled token it finds the argmax."""
    texts = [
        (prompt, choice) for prompt, output in zip(case.prompts * 2, outputs, strict=True) for choice in output.outputs
    ]
    different = list({tuple(prompt + choice.token_ids): None for prompt, choice in texts})
    with open_model(case, folder, **plain_options(case)) as llm:
        read = llm.generate(
            prompt_token_ids=[list(text) for text in different],
            sampling_params=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        )
    expected = dict(zip(different, (output.prompt_logprobs for output in read), strict=True))
    distances = []
    for prompt, output in zip(case.prompts * 2, outputs, strict=True):
        for choice in output.outputs:
            places = expected[tuple(prompt + choice.token_ids)]
            distances += [place.top_logprobs[0] - place.logprob for place in places[len(prompt) :]]
            told = (output.prompt_logprobs or [None] * len(prompt)) + (choice.logprobs or [])
            distances += [
                abs(ours.logprob - theirs.logprob) for ours,
                theirs in zip(told, places, strict=False) if ours is not None and theirs is not None
            ]
    return torch.tensor(distances)
