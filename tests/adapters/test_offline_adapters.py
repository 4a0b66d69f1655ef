"""`LLM` with LoRA adapters: the tokens of models that have them merged; loading from files and tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))

from adapter_rig import merge, write_adapter
from tiny_checkpoint import write_tiny_checkpoint

from headrace import LLM, LoRARequest, SamplingParams
from headrace.base.errors import ConfigError, Conflict, NotFound, RequestError, UnsupportedFeature

PROMPTS = [[3, 5, 8, 13, 21], [1, 2, 3, 4]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer": True, "dtype": "float32", "device": "cpu", "threads": 1, "kv_pages": 120, "page_size": 4,
    "max_running_requests": 4,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_tiny_checkpoint(folder / "base", 5)
    found = {"": base}
    for i, name in enumerate(("a", "b")):
        found[name] = write_adapter(base, folder / name, i + 1, rank=3 + i)
        found[f"{name} merged"] = merge(base, found[name], folder / f"{name}-merged")
    return found


@pytest.fixture(scope="module")
def wanted(files: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The tokens of each model by itself."""
    tokens = {}
    for name in ("", "a", "b"):
        with LLM(files[f"{name} merged" if name else ""], **OPTIONS) as llm:
            tokens[name] = ids_of(llm.generate(PROMPTS, GREEDY))
    assert len({str(ids) for ids in tokens.values()}) == 3
    return tokens


def serve(files: dict[str, Path]) -> LLM:
    return LLM(files[""], enable_lora=True, lora_modules=[f"a={files['a']}"], max_loras=2, **OPTIONS)


@pytest.fixture
def llm(files: dict[str, Path]) -> Iterator[LLM]:
    with serve(files) as llm:
        yield llm


@pytest.fixture(scope="module")
def refusing(files: dict[str, Path]) -> Iterator[LLM]:
    """Of tests that leave it as it was."""
    with serve(files) as llm:
        yield llm


def ids_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_one_adapter_or_one_for_each_prompt(llm: LLM, files: dict[str, Path], wanted: dict[str, list[list[int]]]):
    a, b = LoRARequest("a"), LoRARequest("b", str(files["b"]))
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == wanted[""]
    assert ids_of(llm.generate(PROMPTS, GREEDY, lora_request=a)) == wanted["a"]
    assert ids_of(llm.generate(PROMPTS, GREEDY, lora_request=b)) == wanted["b"]
    mixed = llm.generate([*PROMPTS, PROMPTS[0]], GREEDY, lora_request=[b, None, a])
    assert ids_of(mixed) == [wanted["b"][0], wanted[""][1], wanted["a"][0]]
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == wanted[""]
    assert [info.name for info in llm.adapters.describe()] == ["a", "b"] == llm.adapters.names


def test_tensors_replace_and_unload(llm: LLM, files: dict[str, Path], wanted: dict[str, list[list[int]]]):
    def content(name: str) -> dict[str, Any]:
        config = json.loads((files[name] / "adapter_config.json").read_text())
        return {"tensors": load_file(files[name] / "adapter_model.safetensors"), "config": config}

    info = llm.load_adapter("policy", **content("a"))
    assert info.rank == 3 and info.digest and "q_proj" in info.modules
    policy = LoRARequest("policy")
    assert ids_of(llm.generate(PROMPTS, GREEDY, lora_request=policy)) == wanted["a"]
    with pytest.raises(Conflict):
        llm.load_adapter("policy", **content("b"))
    again = llm.load_adapter("policy", **content("b"), replaces=True)
    assert again.digest != info.digest
    assert ids_of(llm.generate(PROMPTS, GREEDY, lora_request=policy)) == wanted["b"], "no cached prefix of the old one"
    llm.load_adapter("policy", files["a"], replaces=True)
    assert ids_of(llm.generate(PROMPTS, GREEDY, lora_request=policy)) == wanted["a"]
    llm.adapters.unload("policy")
    with pytest.raises(NotFound, match="policy"):
        llm.generate(PROMPTS, GREEDY, lora_request=policy)
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == wanted[""]


@pytest.mark.parametrize(("request_", "error"), [
    (LoRARequest("none"), NotFound), (LoRARequest("a", "elsewhere"), Conflict), ("a", RequestError),
    ([LoRARequest("a")], RequestError), (LoRARequest("", "x"), RequestError),
], ids=["unknown", "another path", "text", "too few", "no name"])
def test_a_wrong_lora_request(refusing: LLM, request_: Any, error: type[Exception]):
    with pytest.raises(error):
        refusing.generate(PROMPTS, GREEDY, lora_request=request_)


def test_what_cannot_be_loaded_costs_nothing(refusing: LLM, tmp_path: Path, wanted: dict[str, list[list[int]]]):
    with pytest.raises(Exception, match="no adapter at"):
        refusing.generate(PROMPTS, GREEDY, lora_request=LoRARequest("x", str(tmp_path / "none")))
    with pytest.raises(RequestError, match="path or tensors"):
        refusing.load_adapter("x")
    with pytest.raises(RequestError, match="config"):
        refusing.load_adapter("x", tensors={})
    with pytest.raises(NotFound):
        refusing.adapters.unload("x")
    assert refusing.adapters.names == ["a"]
    assert ids_of(refusing.generate(PROMPTS, GREEDY, lora_request=LoRARequest("a"))) == wanted["a"]


def test_without_enable_lora(files: dict[str, Path]):
    with LLM(files[""], **OPTIONS) as llm:
        with pytest.raises(UnsupportedFeature, match="enable_lora"):
            llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("a", str(files["a"])))
        assert llm.generate(PROMPTS, GREEDY, lora_request=[None, None])
    with pytest.raises(ConfigError, match="lora_modules"):
        LLM(files[""], enable_lora=True, lora_modules="nonsense", **OPTIONS)
