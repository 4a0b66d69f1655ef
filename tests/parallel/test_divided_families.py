"""Every decoder, divided in every way, says what transformers' own model says: the same greedy tokens behind prompts of
the same log probabilities, from a checkpoint of which each rank reads its part.

One case of each in two parts runs always; all cases, four ranks and replicas with ``--slow``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.rank_processes import RankProcesses
from safetensors.torch import save_file

from headrace import LLM, SamplingParams
from headrace.models.catalog import ARCHITECTURES
from headrace.service import build

sys.path.append(str(Path(__file__).parents[1] / "models"))

from family_cases import CASES, CLASSES, MAX_MODEL_LEN, config_json, make_oracle, prompt

NEW_TOKENS = 8
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DIVIDED = {"enable_expert_parallel": True}
MOVING = {**DIVIDED, "enable_eplb": True, "eplb_config": '{"step_interval": 2, "num_redundant_experts": 2}'}
LAYOUTS = {
    "tp2": (2, 1, {}), "pp2": (1, 2, {}), "ep2": (2, 1, DIVIDED), "eplb2": (2, 1, MOVING), "tp4": (4, 1, {}),
    "tp2pp2": (2, 2, {}),
}
"""Ranks of a stage, stages, and options."""
FIRST = {kind: name for name, (kind, _) in reversed(CASES.items())}
"""The first case of each kind of model."""


@pytest.fixture(scope="module", params=LAYOUTS)
def divided(request: pytest.FixtureRequest) -> Iterator[tuple[str, RankProcesses]]:
    if request.param in ("tp4", "tp2pp2") and not request.config.getoption("slow"):
        pytest.skip("four ranks run with --slow")
    tensor, pipeline, _ = LAYOUTS[request.param]
    made = RankProcesses(tensor, pipeline)
    yield request.param, made
    made.close()


def write(name: str, folder: Path) -> torch.nn.Module:
    """The oracle, and its checkpoint."""
    oracle = make_oracle(*CASES[name])
    tensors = {key: tensor.contiguous().clone() for key, tensor in oracle.state_dict().items()}
    if oracle.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    oracle.config.architectures = config_json(oracle)["architectures"]
    oracle.config.save_pretrained(folder)
    return oracle


@torch.no_grad()
def expect(oracle: Any, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    """What follows, and log probabilities of the prompt's tokens from the second on."""
    found = oracle.generate(torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, do_sample=False)
    logprobs = oracle(torch.tensor([tokens]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return found[0, len(tokens) :].tolist(), logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def check(llm: LLM, expected: list[tuple[list[int], torch.Tensor]]) -> None:
    for output, (tokens, logprobs) in zip(
        llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS), expected, strict=True
    ):
        assert output.outputs[0].token_ids == tokens
        found = torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]])
        torch.testing.assert_close(found, logprobs, atol=1e-3, rtol=1e-3)


PROMPTS = [prompt(seed, length) for seed, length in ((0, 23), (1, 7), (2, 12))]
PARAMS = SamplingParams(
    max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=0
)


def options_of(name: str, folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder), "skip_tokenizer": True, "dtype": "float32", "device": "cpu", "threads": 1,
        "kv_pages": 64, "max_step_tokens": 16, "max_model_len": MAX_MODEL_LEN.get(name, 128),
    }


def has_experts(name: str) -> bool:
    return any(field in CASES[name][1] for field in EXPERTS)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(
    divided: tuple[str, RankProcesses], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    layout, ranks = divided
    if FIRST[CASES[name][0]] != name and not request.config.getoption("slow"):
        pytest.skip("the first case of each kind runs without --slow")
    if layout in ("ep2", "eplb2") and not has_experts(name):
        pytest.skip("it has no experts")
    oracle = write(name, tmp_path)
    expected = [expect(oracle, tokens) for tokens in PROMPTS]
    options = options_of(name, tmp_path)
    monkeypatch.setattr(build, "build_executor", ranks.builder({**options, **LAYOUTS[layout][2]}))
    with LLM(**options) as llm:
        check(llm, expected)
        llm.check()
        if layout == "eplb2":
            check(llm, expected)
            assert llm.stats().experts.num_moved > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIRST)
def test_replicas_say_it_too(kind: str, tmp_path: Path):
    """Those of mixtures divide the experts: a step of one is a step of both."""
    oracle, own = write(FIRST[kind], tmp_path), {"data_parallel_size": 2, "data_parallel_policy": "round-robin"}
    expected = [expect(oracle, tokens) for tokens in PROMPTS]
    if has_experts(FIRST[kind]):
        own["enable_expert_parallel"] = True
    with LLM(**options_of(FIRST[kind], tmp_path), **own) as llm:
        check(llm, expected)


def test_every_decoder_has_a_case():
    decoders = {name for name in ARCHITECTURES if name.endswith("ForCausalLM")}
    covered = {CLASSES.get(kind, f"{kind}ForCausalLM") for kind, _ in CASES.values()}
    assert decoders - covered == {"DeepseekV4ForCausalLM", "Phi4MultimodalForCausalLM"}, "which have tests of their own"
