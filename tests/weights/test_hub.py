"""Fetching models from a hub: which files are taken, what happens after an interruption, and how errors read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, running_hub

import headrace.models.hub
from headrace.base.config import ModelConfig
from headrace.base.errors import ModelError
from headrace.models.hub import Download, pull
from headrace.models.hub_files import choose_weights, parse_name, read_name, supporting_files
from headrace.models.source import resolve_source

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 32}).encode()
SAFE, BIN, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
SHARDS = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
PARTS = [f"big-Q8_0-{i:05d}-of-00002.gguf" for i in (1, 2)]


@pytest.mark.parametrize(("name", "files", "weights", "entry"), [
    ("a/b", [SAFE, BIN, "model.fp16.safetensors", "onnx/model.onnx"], [SAFE], None),
    ("a/b", [*SHARDS, INDEX, "consolidated.safetensors", "original/x.pth"], SHARDS, None),
    ("a/b", ["weights.safetensors", "consolidated.safetensors"], ["weights.safetensors"], None),
    ("a/b", ["consolidated.safetensors"], ["consolidated.safetensors"], None),
    ("a/b", [SAFE, "2_Dense/model.safetensors", "sub/other.safetensors"], [SAFE, "2_Dense/model.safetensors"], None),
    ("a/b", [SAFE, "b-Q4_K_M.gguf"], [SAFE], None),
    ("a/b:q4_k_m", [SAFE, "b-Q4_K_M.gguf"], ["b-Q4_K_M.gguf"], "b-Q4_K_M.gguf"),
    ("a/b", ["only.gguf", "mmproj-only.gguf", "imatrix.gguf"], ["only.gguf"], "only.gguf"),
    ("a/b", ["b.Q2_K.gguf", "b.Q4_K_M.gguf", "b.Q8_0.gguf"], ["b.Q4_K_M.gguf"], "b.Q4_K_M.gguf"),
    ("a/b/b.Q2_K.gguf", ["b.Q2_K.gguf", "b.Q4_K_M.gguf"], ["b.Q2_K.gguf"], "b.Q2_K.gguf"),
    ("a/b:Q8_0", ["x.gguf", *PARTS], PARTS, PARTS[0]),
    (f"a/b/{PARTS[0]}", ["x.gguf", *PARTS], PARTS, PARTS[0]),
    ("a/b:Q8_0", [*(f"Q8_0/{part}" for part in PARTS), "Q4/x.gguf"], [f"Q8_0/{p}" for p in PARTS], f"Q8_0/{PARTS[0]}"),
])
def test_the_files_that_make_a_model(name: str, files: list[str], weights: list[str], entry: str | None):
    chosen = choose_weights(files, parse_name(name))
    assert (list(chosen.weights), chosen.entry) == (weights, entry)


@pytest.mark.parametrize(("name", "files", "words"), [
    ("a/b", [BIN, "config.json"], "only pickles (pytorch_model.bin), which can run code"),
    ("a/b", ["README.md"], "neither safetensors nor GGUF"),
    ("a/b", ["x.Q2.gguf", "x.Q3.gguf"], "as in a/b/x.Q2.gguf"),
    ("a/b:Q5", ["x.Q2.gguf", "x.Q3.gguf"], "as in a/b/x.Q2.gguf"),
    ("a/b/none.gguf", ["x.Q2.gguf"], "as in a/b/x.Q2.gguf"),
    ("a/b:Q2", [SAFE, "x.Q2.gguf", "y.Q2.gguf"], "as in a/b/x.Q2.gguf"),
])
def test_what_cannot_be_chosen_is_explained(name: str, files: list[str], words: str):
    with pytest.raises(ModelError) as caught:
        choose_weights(files, parse_name(name))
    assert words in str(caught.value)


def test_only_files_of_the_model_come_along():
    files = ["config.json", "tokenizer.model", "chat_template.jinja", "1_Pooling/config.json", "onnx/config.json",
             "README.md", "train.py", "vocab.txt"]
    assert supporting_files(files) == ["config.json", "tokenizer.model", "chat_template.jinja", "1_Pooling/config.json",
                                       "vocab.txt"]


@pytest.mark.parametrize(("typed", "name"), [
    ("a/b", "a/b"), ("https://huggingface.co/a/b", "a/b"), ("hf.co/a/b:Q4_K_M", "a/b:Q4_K_M"),
    ("https://huggingface.co/a/b/tree/main", "a/b"), ("gpt2", "gpt2"),
])
def test_names_as_users_copy_them(typed: str, name: str):
    assert read_name(typed) == name


@pytest.mark.parametrize("typed", ["", "a/b/c/d", "../etc", "a b", "./folder", "http://example.com/a/b"])
def test_other_names_are_refused(typed: str):
    with pytest.raises(ModelError, match="OWNER/NAME"):
        read_name(typed)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub on this machine, with an empty cache; this process asks it."""
    from huggingface_hub import constants

    with running_hub() as hub:
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub


def fetch(name: str, revision: str | None = None) -> tuple[Path, Download]:
    told: list[Download] = []
    path = pull(name, revision, before=told.append)
    return path, told[0]


def test_a_model_is_fetched_once_and_served_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    hub.repositories["acme/rocket"] = {
        "config.json": CONFIG, SAFE: b"x" * 5000, BIN: b"p" * 5000, "README.md": b"r", "onnx/model.onnx": b"o"
    }
    path, download = fetch("acme/rocket")
    assert sorted(hub.fetched()) == ["config.json", SAFE]
    assert (path / SAFE).read_bytes() == b"x" * 5000
    assert (download.commit, [file.num_bytes for file in download.missing]) == (COMMIT, [len(CONFIG), 5000])
    assert fetch("acme/rocket")[1].missing == () and len(hub.gets) == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.repositories.clear()
    source = resolve_source(ModelConfig(model="acme/rocket"))
    assert (source.name, source.path, source.config["hidden_size"]) == ("acme/rocket", path, 32)


def test_a_new_commit_brings_what_changed(hub: FakeHub):
    hub.repositories["acme/rocket"] = {"config.json": CONFIG, SAFE: b"x" * 5000}
    fetch("acme/rocket")
    hub.repositories["acme/rocket"]["config.json"] = CONFIG.replace(b"32", b"64")
    hub.commit = "d" * 40
    fetch("acme/rocket")
    assert hub.fetched()[2:] == ["config.json"]  # the weights have the same hash
    assert resolve_source(ModelConfig(model="acme/rocket")).config["hidden_size"] == 64


def test_serving_fetches_what_is_missing(hub: FakeHub):
    hub.repositories["acme/new"] = {"config.json": CONFIG, SAFE: b"x", BIN: b"p", "consolidated.safetensors": b"c"}
    assert resolve_source(ModelConfig(model="acme/new", revision="v2")).name == "acme/new"
    assert sorted(hub.fetched()) == ["config.json", SAFE]
    assert resolve_source(ModelConfig(model="acme/new", revision="v2", load_format="dummy")).config["hidden_size"] == 32


def test_one_gguf_file_of_many(hub: FakeHub):
    hub.repositories["acme/many"] = {f"m-{tag}.gguf": b"G" + tag.encode() for tag in ("Q2_K", "Q4_K_M", "Q8_0")}
    assert fetch("acme/many")[0].name == "m-Q4_K_M.gguf"
    assert fetch("acme/many:Q8_0")[0].name == "m-Q8_0.gguf"
    assert fetch("acme/many/m-Q2_K.gguf")[0].name == "m-Q2_K.gguf"
    assert sorted(hub.fetched()) == ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"]


def test_offline_the_cached_gguf_files_are_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    hub.repositories["acme/many"] = {f"m-{tag}.gguf": b"G" + tag.encode() for tag in ("Q2_K", "Q4_K_M", "Q8_0")}
    fetch("acme/many:Q8_0")
    fetch("acme/many:Q2_K")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("acme/many", "acme/many:Q4_K_M"):
        with pytest.raises(ModelError, match=r"of acme/many the cache has m-Q2_K.gguf, m-Q8_0.gguf"):
            resolve_source(ModelConfig(model=name))


def test_names_from_the_hub_cannot_leave_its_folder(hub: FakeHub, tmp_path: Path):
    hub.repositories["acme/evil"] = {
        "config.json": CONFIG, "../../../../evil.gguf": b"e", "/evil.gguf": b"e", "1_x/..\\evil.json": b"e", SAFE: b"x"
    }
    _, download = fetch("acme/evil")
    assert [file.name for file in download.files] == ["config.json", SAFE]
    hub.commit = "../../../x"
    with pytest.raises(ModelError, match="names no commit"):
        fetch("acme/evil")
    assert not list(tmp_path.rglob("evil*"))


def test_a_full_disk_says_so(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.repositories["acme/rocket"] = {"config.json": CONFIG, SAFE: b"x"}
    monkeypatch.setattr(headrace.models.hub, "transfer", fill)
    with pytest.raises(ModelError, match="is full; set HF_HOME"):
        fetch("acme/rocket")


def test_a_damaged_rest_is_fetched_again(hub: FakeHub):
    hub.repositories["acme/rocket"] = {"config.json": CONFIG, SAFE: b"x" * 5000}
    blob = (fetch("acme/rocket")[0] / SAFE).resolve()
    (blob.parents[1] / ".headrace" / f"{blob.name}.partial").write_bytes(b"y" * 1000)
    blob.unlink()
    with pytest.raises(ModelError, match="arrived damaged"):
        fetch("acme/rocket")
    assert (fetch("acme/rocket")[0] / SAFE).read_bytes() == b"x" * 5000


@pytest.mark.parametrize(("name", "status", "code", "words"), [
    ("acme/none", 404, "RepoNotFound", "none of that name"),
    ("acme/gated", 403, "GatedRepo", "hf auth login"),
    ("acme/down", 500, "", "the hub cannot be reached"),
])
def test_what_the_hub_refuses(hub: FakeHub, name: str, status: int, code: str, words: str):
    hub.errors[name] = (status, code)
    with pytest.raises(ModelError, match=words):
        fetch(name)


def test_a_wrong_revision_and_too_little_room(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    hub.repositories["acme/rocket"] = {"config.json": CONFIG, SAFE: b"x" * 5000}
    with pytest.raises(ModelError, match="check --revision"):
        fetch("acme/rocket", "v9")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5000})())
    with pytest.raises(ModelError, match="Set HF_HOME to a folder with room"):
        fetch("acme/rocket")
    assert hub.gets == []


def run_pull(hub: FakeHub, home: Path, *argv: str, **variables: str) -> subprocess.Popen:
    # tests may run in the background of a shell, where SIGINT is ignored
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from headrace.__main__ import main; sys.exit(main())"
    )
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "COLUMNS": "80", **variables
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, "pull", *argv], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True
    )


def test_the_command_goes_on_where_it_was_interrupted(tmp_path: Path):
    weights = os.urandom(24 << 20)
    with running_hub() as hub:
        hub.repositories["acme/rocket"] = {"config.json": CONFIG, SAFE: weights}
        hub.stalls[SAFE] = 20 << 20
        first = run_pull(hub, tmp_path, "acme/rocket")
        assert hub.is_stalled.wait(100)
        deadline = time.monotonic() + 60
        while not any(f.stat().st_size >= 10 << 20 for f in (tmp_path / "hub").rglob("*.partial")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first.send_signal(signal.SIGINT)
        out, err = first.communicate(timeout=60)
        assert (first.returncode, "Traceback" in err) == (130, False), err
        assert "2 files, 25 MB" in out
        hub.stalls.clear()
        hub.go_on.set()
        second = run_pull(hub, tmp_path, "https://huggingface.co/acme/rocket")
        out, err = second.communicate(timeout=100)
    assert second.returncode == 0, err
    assert "serve it: headrace serve acme/rocket" in out and "LlamaForCausalLM, 25 MB" in out
    start = int(hub.gets[-1][1].removeprefix("bytes=").removesuffix("-"))
    assert 1 << 20 < start <= 20 << 20
    snapshot = tmp_path / "hub" / "models--acme--rocket" / "snapshots" / COMMIT
    assert (snapshot / SAFE).read_bytes() == weights


def test_the_command_says_what_it_cannot_do(tmp_path: Path):
    with running_hub() as hub:
        hub.repositories["acme/pickled"] = {"config.json": CONFIG, BIN: b"p"}
        hub.repositories["acme/alien"] = {"config.json": CONFIG.replace(b"Llama", b"Alien"), SAFE: b"x"}
        pickled, alien = run_pull(hub, tmp_path, "acme/pickled"), run_pull(hub, tmp_path, "acme/alien")
        offline = run_pull(hub, tmp_path, "acme/rocket", HF_HUB_OFFLINE="1")
        results = [(p.communicate(timeout=100), p.returncode) for p in (pickled, alien, offline)]
        assert BIN not in hub.fetched()
        url = hub.url
    (_, err), code = results[0]
    assert code == 2 and "only pickles" in err and len(err.splitlines()) == 1
    (out, _), code = results[1]
    assert code == 1 and "cannot be served" in out and "AlienForCausalLM" in out
    (_, err), code = results[2]
    assert code == 2 and "HF_HUB_OFFLINE is set; unset it" in err
    gone = run_pull(hub, tmp_path, "acme/rocket")  # nobody listens any more
    _, err = gone.communicate(timeout=100)
    assert gone.returncode == 2 and url in err and "Go online" in err and "Traceback" not in err
