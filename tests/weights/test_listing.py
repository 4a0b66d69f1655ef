"""What ``headrace models`` finds: folders, GGUF files, packages, the hub cache, and why one cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.models import listing
from headrace.models.listing import ListedModel, list_models
from headrace.service.model_files import FIXED_BYTES, Memory
from headrace.serving.cli import models as command
from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import parse_command


@pytest.fixture(autouse=True)
def _empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No packages, an empty cache, and the current folder elsewhere."""
    from huggingface_hub import constants

    monkeypatch.setattr(listing, "installed_names", set)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def new_folder(path: Path, *, weights: bool = True, **config: object) -> Path:
    path.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "max_position_embeddings": 64, **config}
    (path / "config.json").write_text(json.dumps(config))
    if weights:
        save_file({"w": torch.zeros(1000)}, path / "model.safetensors")
    return path


def new_gguf(path: Path, architecture: str = "llama") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(128)
    writer.add_tensor("token_embd.weight", np.ones((30, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def found(*folders: Path) -> dict[str, ListedModel]:
    return {model.name: model for model in list_models(folders or (Path.cwd(),))}


def test_folders_and_files_below_the_current_folder():
    here = Path.cwd()
    new_folder(here / "llama")
    new_folder(here / "deep" / "er" / "quantized", quantization_config={"quant_method": "fp8"})
    new_gguf(here / "files" / "m.gguf")
    new_gguf(here / "files" / "mmproj-m.gguf")
    for hidden in (".cache/x", "node_modules/x", "a/b/c/d/too-deep"):
        new_folder(here / hidden)
    new_folder(here / "env" / "x")
    (here / "env" / "pyvenv.cfg").touch()
    (here / "loop").symlink_to(here)
    models = found()
    assert set(models) == {"./llama", "./deep/er/quantized", "./files/m.gguf"}
    plain, other, file = (models[name] for name in ("./llama", "./deep/er/quantized", "./files/m.gguf"))
    assert (plain.architecture, plain.family, plain.quantization, plain.max_len, plain.problem) == (
        "LlamaForCausalLM", "llama", "bfloat16", 64, ""
    )
    assert plain.num_bytes == (here / "llama" / "model.safetensors").stat().st_size
    assert other.quantization == "fp8"
    assert (file.architecture, file.family, file.quantization, file.max_len) == ("llama", "llama", "Q4_K_M", 128)


def test_folders_that_are_given_and_models_themselves(tmp_path: Path):
    one, file = new_folder(tmp_path / "store" / "one"), new_gguf(tmp_path / "store" / "m.gguf")
    assert set(found(tmp_path / "store")) == {str(one), str(file)}
    assert set(found(one)) == {str(one)} and set(found(file)) == {str(file)}
    assert found() == {}


def test_what_cannot_be_served_says_why():
    here = Path.cwd()
    new_folder(here / "alien", architectures=["AlienForCausalLM"])
    new_folder(here / "nameless", architectures=None)
    (new_folder(here / "partial", weights=False) / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "model-1.safetensors"}}'
    )
    new_gguf(here / "alien.gguf", "alien")
    (here / "broken.gguf").write_bytes(b"not GGUF at all, but long enough to be read")
    (new_folder(here / "odd") / "config.json").write_text("{")
    problems = {name: model.problem for name, model in found().items()}
    assert "AlienForCausalLM" in problems["./alien"] and "alien" in problems["./alien.gguf"]
    assert "names no architecture" in problems["./nameless"] and "lacks 1 of 1" in problems["./partial"]
    assert "not a GGUF file" in problems["./broken.gguf"] and "no JSON" in problems["./odd"]


def cached(tmp_path: Path, name: str, *, is_complete: bool = True) -> Path:
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    if is_complete:
        (repository / "refs" / "main").write_text("abc")
    return repository / "snapshots" / "abc"


def test_the_hub_cache(tmp_path: Path):
    new_folder(cached(tmp_path, "acme/safe"))
    new_gguf(cached(tmp_path, "acme/one") / "one.gguf")
    two = cached(tmp_path, "acme/two")
    new_gguf(two / "a.gguf")
    new_gguf(two / "b.gguf")
    new_folder(cached(tmp_path, "acme/half", is_complete=False), weights=False)
    (cached(tmp_path, "acme/nothing", is_complete=False)).mkdir(parents=True)
    new_folder(cached(tmp_path, "acme/commit", is_complete=False))
    new_folder(cached(tmp_path, "acme/tag", is_complete=False)).parents[1].joinpath("refs", "v2").write_text("abc")
    pickled = new_folder(cached(tmp_path, "acme/pickled"), weights=False)
    (pickled / "pytorch_model.bin").touch()
    models = found()
    assert set(models) == {
        "acme/safe", "acme/one", "acme/two/a.gguf", "acme/two/b.gguf", "acme/half", "acme/pickled",
        "acme/nothing", "acme/commit --revision abc", "acme/tag --revision v2"
    }
    assert {model.place for model in models.values()} == {"hub"}
    assert not models["acme/safe"].problem and not models["acme/two/b.gguf"].problem
    assert "headrace pull acme/half" in models["acme/half"].problem
    assert "headrace pull acme/nothing" in models["acme/nothing"].problem
    assert "pickle" in models["acme/pickled"].problem


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = new_gguf(tmp_path / "whole.gguf").read_bytes()
    parts = [tmp_path / f"m.gguf.part{i}" for i in (0, 1)]
    cut = len(whole) - 500
    for part, data in zip(parts, (whole[:cut], whole[cut:]), strict=True):
        part.write_bytes(data)
    folder = new_folder(tmp_path / "package")
    monkeypatch.setattr(listing, "installed_names", lambda: {"big-part1", "big-part2", "small"})
    monkeypatch.setattr(listing, "find_parts", lambda name: parts if name == "big" else [])
    monkeypatch.setattr(listing, "find_package", lambda name: folder)
    models = found()
    assert set(models) == {"big", "small"}
    assert (models["big"].num_bytes, models["big"].quantization) == (len(whole), "Q4_K_M")
    assert models["small"].family == "llama" and models["small"].place == "package"


def test_whether_it_fits():
    model = ListedModel("m", "folder", Path("m"), 10**9, quantization="Q4_K_M")
    needed = int(1.1e9) + FIXED_BYTES
    assert Memory("cpu", needed).fits(model) and not Memory("cpu", needed - 1).fits(model)
    assert not Memory("cuda", 3 * 10**9).fits(model)  # dequantized there
    assert Memory("cuda", needed).fits(ListedModel("m", "folder", Path("m"), 10**9, quantization="bfloat16"))


def run(capsys: pytest.CaptureFixture, *argv: str) -> str:
    assert command.run(parse_command(COMMANDS["models"], list(argv))) == 0
    return capsys.readouterr().out


def test_the_command(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "find_memory", lambda: Memory("cpu", FIXED_BYTES + 10_000))
    monkeypatch.setenv("COLUMNS", "80")
    assert "headrace pull OWNER/NAME" in run(capsys)
    here = Path.cwd()
    new_folder(here / "llama")
    new_folder(here / ("a-long-name-" * 12))
    new_folder(here / "alien", architectures=["AlienForCausalLM"])
    save_file({"w": torch.zeros(100_000)}, new_folder(here / "large") / "model.safetensors")
    text = run(capsys)
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in text.splitlines())
    assert "./" + "a-long-name-" * 12 in text.split()
    one = text.partition("./llama\n")[2].splitlines()[0]
    assert one.strip() == "LlamaForCausalLM, bfloat16, 4 kB, context 64, fits in memory"
    assert "too large: needs about 269 MB" in text and "cannot be served: no model family serves" in text
    listed = {row["name"]: row for row in json.loads(run(capsys, "--json"))["models"]}
    assert (listed["./llama"]["fits"], listed["./large"]["fits"]) == (True, False)
    assert listed["./alien"]["problem"] and listed["./llama"]["path"] == str(here / "llama")
