"""Adapters of every family through the whole engine: log probabilities of the prompt are those of PEFT, merged and
unmerged, and those of the base beside them; and tokens behind images and sound."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft_rig as rig
import pytest
import torch

from headrace import LLM, LoRARequest, SamplingParams
from headrace.base.adapters import LoadAdapter
from headrace.base.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "models"))

import test_audio_models as audio
import test_dual_encoders as dual
import test_image_families as images
import test_qwen_vl as qwen
from family_cases import CASES, make_oracle
from media_rig import Prompt, compare, run, start_engine

pytest.importorskip("peft")

FIRST = {kind: name for name, (kind, _) in reversed(CASES.items())}
"""The first case of each kind of model."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0)
PROMPT = rig.TOKENS[0].tolist()
OPTIONS: dict[str, Any] = {
    "skip_tokenizer": True, "dtype": "float32", "device": "cpu", "threads": 1, "kv_pages": 80, "page_size": 4,
    "enable_lora": True, "max_loras": 1, "max_lora_rank": 16,
}


def read_logprobs(llm: LLM, request: LoRARequest | None) -> torch.Tensor:
    (output,) = llm.generate([PROMPT], PARAMS, lora_request=request)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None])


def expect(model: Any) -> torch.Tensor:
    logprobs = rig.outputs_of(model)[0].log_softmax(-1)
    return logprobs[:-1].gather(1, rig.TOKENS[0, 1:, None])[:, 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FIRST)
def test_all_linear(kind: str, tmp_path: Path):
    base = make_oracle(*CASES[FIRST[kind]])
    base.save_pretrained(str(tmp_path / "base"))
    adapted = rig.adapt(base, tmp_path / "adapter", target_modules="all-linear")
    unmerged = expect(adapted)
    with LLM(tmp_path / "base", **OPTIONS) as llm:
        found = read_logprobs(llm, LoRARequest("a", str(tmp_path / "adapter")))
        plain = read_logprobs(llm, None)
    torch.testing.assert_close(found, unmerged, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, expect(adapted.merge_and_unload()), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(plain, expect(base), rtol=1e-3, atol=1e-3)
    assert (found - plain).abs().max() > 1e-2


MEDIA = {
    **{name: images.MAKERS[name] for name in images.MAKERS}, **{name: qwen.MAKERS[name] for name in qwen.MAKERS},
    "mistral3": images.make_mistral3, "qwen2_audio": audio.make_listener,
}
DECODER = r".*language_model.*_proj"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MEDIA)
def test_the_decoder_beside_images_and_sound(name: str, tmp_path: Path):
    made = MEDIA[name](tmp_path / "base")
    base = made[0] if isinstance(made, tuple) else made
    adapted = rig.adapt(base, tmp_path / "adapter", target_modules=DECODER)
    if name in images.MAKERS:
        prompt, expect_media = images.prompts(made[1])[0], images.expect
    elif name in qwen.MAKERS:
        prompt, expect_media = qwen.add_image(Prompt().text(3, 4), (1, 4, 6), 0).text(5, 6), qwen.expect
    elif name == "mistral3":
        prompt, expect_media = Prompt().text(3, 4, 5, 6), lambda model, prompt: images.ask_oracle(model, prompt)
    else:
        prompt, expect_media = audio.add_clip(Prompt().text(3), 17, 0).text(4, 5), audio.expect
    engine = start_engine(tmp_path / "base", enable_lora=True, max_lora_rank=16, max_step_tokens=256)
    engine.adapters.load(LoadAdapter("a", str(tmp_path / "adapter")))
    compare(run(engine, [prompt], adapter="a")[0], expect_media(adapted, prompt), atol=1e-3)
    compare(run(engine, [prompt])[0], expect_media(base, prompt), atol=1e-3)
    engine.close()


def make_deepseek_v4(folder: Path) -> None:
    folder.mkdir()
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 8,
        "num_hidden_layers": 1, "compress_ratios": [0], "num_attention_heads": 2, "head_dim": 16, "o_lora_rank": 8,
        "qk_rope_head_dim": 8, "q_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 1,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("make", [make_deepseek_v4, audio.make_writer, dual.make_clip, dual.make_siglip])
def test_families_without_adapters_say_so(make: Any, tmp_path: Path):
    """Rather than to leave something out of what PEFT would compute."""
    make(tmp_path / "base")
    with pytest.raises(ConfigError, match="models take no adapters; leave out enable_lora"):
        start_engine(tmp_path / "base", enable_lora=True, load_format="dummy", max_model_len=None, page_size=None)
