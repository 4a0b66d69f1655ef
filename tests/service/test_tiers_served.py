"""Prefixes in host memory, served: the same greedy tokens with and without, for every kind of cache."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import test_deepseek_v4_served as v4
import test_families_served as families

from headrace import LLM, SamplingParams
from headrace.base.config import engine_config
from headrace.base.errors import ConfigError
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.build import build_engine
from headrace.service.engine import Engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
GB = 0.02
SMALL: dict[str, dict[str, Any]] = {"Llama": {}, **families.CASES}
V4: dict[str, dict[str, Any]] = {
    "DeepseekV4": {}, "DeepseekV4 with narrow keys": {"kv_dtype": "fp8_fp4"},
}
"""Options of models that are not `SMALL`."""


def save(name: str, folder: Path) -> tuple[str, dict[str, Any], list[list[int]]]:
    """A saved model, options with a cache that holds one long prompt at a time, and prompts."""
    if name in V4:
        narrow = V4[name]
        widths = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64} if narrow else {}
        v4.make_model(**widths).save_pretrained(folder)
        draw = random.Random(3)
        prompts = [[draw.randrange(1, v4.VOCAB) for _ in range(length)] for length in (700, 520, 515, 769)]
        return str(folder), {**v4.BASE, "kv_pages": 6, **narrow}, prompts
    families.GPU_CASES.setdefault(name, SMALL[name])
    families.make_model(name).save_pretrained(folder)
    return str(folder), {**families.BASE, "kv_pages": 12, "max_model_len": 80}, families.make_prompts()


def run(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """One prompt at a time: tokens, and how many prompt tokens were cached."""
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    return [output.outputs[0].token_ids for output in outputs], sum(o.num_cached_tokens for o in outputs)


@pytest.mark.parametrize("name", [*SMALL, *V4])
def test_the_host_changes_no_token_and_saves_prefills(name: str, tmp_path: Path):
    folder, options, prompts = save(name, tmp_path)
    with LLM(folder, skip_tokenizer=True, prefix_cache=False, **options) as llm:
        expected, _ = run(llm, prompts * 2)
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        without, cached_without = run(llm, prompts * 2)
    with LLM(folder, skip_tokenizer=True, host_cache_gb=GB, **options) as llm:
        tokens, cached = run(llm, prompts * 2)
        together = [o.outputs[0].token_ids for o in llm.generate(prompts * 3, PARAMS)]
        stats = llm.stats().tiers.host
    assert tokens == without == expected and together == expected[: len(prompts)] * 3
    assert cached > cached_without, "what the device evicted came back"
    assert stats.num_pages > 0 and stats.read_pages_total > 0 and stats.failed_pages_total == 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*SMALL, *V4])
def test_a_gpu_changes_no_token_either(name: str, tmp_path: Path):
    folder, options, prompts = save(name, tmp_path)
    options |= {"device": "cuda"}
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        expected, _ = run(llm, prompts * 2)
    with LLM(folder, skip_tokenizer=True, host_cache_gb=GB, **options) as llm:
        tokens, _ = run(llm, prompts * 2)
        stats = llm.stats()
    assert tokens == expected and stats.tiers.host.read_pages_total > 0


def test_two_ranks_move_their_parts_of_a_page_together(tmp_path: Path):
    folder, options, prompts = save("Llama", tmp_path / "model")
    options |= {"disk_cache": str(tmp_path / "cache")}
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        expected, _ = run(llm, prompts * 2)
    options |= {"host_cache_gb": GB, "tensor_parallel_size": 2}
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        tokens, cached = run(llm, prompts * 2)
        stats = llm.stats()
    assert tokens == expected
    assert stats.tiers.host.read_pages_total > 0 and stats.tiers.host.failed_pages_total == 0 and cached > 0
    for path in (tmp_path / "cache" / "place-1").rglob("*.page"):
        path.unlink()
        break
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        tokens, cached = run(llm, prompts * 2)
        stats = llm.stats()
    assert tokens == expected, "a page that one rank lacks is no rank's"
    assert stats.tiers.storage.read_pages_total > 0


@pytest.mark.parametrize("name", [*SMALL, *V4])
def test_a_restarted_engine_finds_its_prefixes_on_disk(name: str, tmp_path: Path):
    folder, options, prompts = save(name, tmp_path / "model")
    options |= {"host_cache_gb": GB, "disk_cache": str(tmp_path / "cache"), "disk_cache_gb": 0.1}
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        expected, _ = run(llm, prompts)
        await_written(llm)
        assert llm.stats().tiers.storage.written_pages_total > 0
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        tokens, cached = run(llm, prompts)
        stats = llm.stats().tiers.storage
    assert tokens == expected and cached > 0
    assert stats.read_pages_total > 0 and stats.failed_pages_total == 0
    for path in (tmp_path / "cache").rglob("*.page"):  # all of them rotten: a miss each, and the right tokens
        raw = bytearray(path.read_bytes())
        raw[100] ^= 1
        path.write_bytes(raw)
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        assert run(llm, prompts)[0] == expected
        assert llm.stats().tiers.storage.read_pages_total == 0


def await_written(llm: LLM) -> None:
    """Steps of a short prompt, until pages of those before are on disk."""
    for _ in range(30):
        llm.generate([[5]], PARAMS)
        time.sleep(0.01)


def test_other_weights_find_nothing(tmp_path: Path):
    folder, options, prompts = save("Llama", tmp_path / "model")
    options |= {"disk_cache": str(tmp_path / "cache")}
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        run(llm, prompts)
        await_written(llm)
    for change in ({"page_size": 16, "kv_pages": 8}, {"dtype": "bfloat16"}):
        with LLM(folder, skip_tokenizer=True, **options | change) as llm:
            run(llm, prompts[:1])
            assert llm.stats().tiers.storage.read_pages_total == 0
    # Another host has the same files elsewhere, with other times; other contents are another model.
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    (weights,) = moved.glob("*.safetensors")
    os.utime(weights, (1, 1))
    reads = []
    for _ in range(2):
        with LLM(str(moved), skip_tokenizer=True, **options) as llm:
            run(llm, prompts[:1])
            reads.append(llm.stats().tiers.storage.read_pages_total)
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    assert reads[0] > 0 and reads[1] == 0


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
STRETCHED = json.dumps({"rope_parameters": DYNAMIC})
"""Rotary frequencies that depend on the longest context served."""


def test_keys_rotated_for_another_longest_context_are_not_found(tmp_path: Path):
    folder, options, prompts = save("Llama", tmp_path / "model")
    options |= {"config_overrides": STRETCHED}
    stored = options | {"disk_cache": str(tmp_path / "cache")}
    with LLM(folder, skip_tokenizer=True, **stored) as llm:
        before, _ = run(llm, prompts)
        await_written(llm)
    options |= {"max_model_len": 160, "kv_pages": 24}
    stored |= options
    with LLM(folder, skip_tokenizer=True, prefix_cache=False, **options) as llm:
        expected, _ = run(llm, prompts)
    with LLM(folder, skip_tokenizer=True, **stored) as llm:
        assert run(llm, prompts)[0] == expected != before
        assert llm.stats().tiers.storage.read_pages_total == 0


def complete(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """One prompt after another; ends when no page moves any more either."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.submit(EngineRequest(name, prompt, SamplingSpec(), StopSpec(max_tokens=4)))
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        engine.check()
    return list(tokens.values())


def test_no_page_of_other_weights_comes_back_and_sleep_keeps_pages_moving(tmp_path: Path):
    first, options, prompts = save("Llama", tmp_path / "first")
    model = families.make_model("Llama")
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    second = str(tmp_path / "second")
    model.save_pretrained(second)

    def build(model: str, **more: Any) -> Engine:
        return build_engine(engine_config(model=model, skip_tokenizer=True, **options, **more))

    expected = {}
    for folder in (first, second):
        plain = build(folder)
        expected[folder] = complete(plain, prompts)
        plain.close()
    assert expected[first] != expected[second]
    engine = build(first, host_cache_gb=GB, disk_cache=str(tmp_path / "cache"))
    assert complete(engine, prompts) == expected[first]
    engine.drain()
    engine.executor.acquire_memory(["kv_cache"])  # nothing is away: pages must go on to move
    assert complete(engine, prompts * 2) == expected[first] * 2
    assert engine.stats().tiers.host.read_pages_total > 0 and engine.stats().tiers.host.failed_pages_total == 0
    engine.drain()
    engine.executor.replace_weights(second, "auto")
    assert complete(engine, prompts * 2) == expected[second] * 2
    engine.drain()
    engine.executor.release_memory(["weights", "kv_cache"])
    engine.executor.acquire_memory(["weights", "kv_cache"])
    read = engine.stats().tiers.storage.read_pages_total
    assert complete(engine, prompts) == expected[second]
    assert engine.stats().tiers.storage.read_pages_total > read, "their own pages are still on disk"
    assert engine.stats().tiers.host.failed_pages_total == 0
    engine.close()


def test_weights_that_stayed_in_memory_keep_their_pages_when_their_files_are_gone(tmp_path: Path):
    folder, options, prompts = save("Llama", tmp_path / "first")
    engine = build_engine(
        engine_config(
            model=folder, skip_tokenizer=True, **options, host_cache_gb=GB, disk_cache=str(tmp_path / "cache")
        )
    )
    expected = complete(engine, prompts)
    engine.drain()
    for path in Path(folder).glob("*.safetensors"):
        path.unlink()
    engine.executor.release_memory(["weights", "kv_cache"])
    engine.executor.acquire_memory(["weights", "kv_cache"])
    read = engine.stats().tiers.storage.read_pages_total
    assert complete(engine, prompts) == expected
    assert engine.stats().tiers.storage.read_pages_total > read
    engine.close()


PLUGIN = """
from pathlib import Path

from headrace.base.registry import PLUGIN_API as plugin_api

class Store:
    plugin_api = plugin_api

    def __init__(self, options):
        self.folder = Path(options.config["folder"])

    def exists(self, names):
        return [(self.folder / name).exists() for name in names]

    def get(self, names, buffers):
        for name, buffer in zip(names, buffers):
            if (self.folder / name).exists():
                buffer[:] = (self.folder / name).read_bytes()
        return self.exists(names)

    def put(self, names, buffers):
        for name, buffer in zip(names, buffers):
            (self.folder / name).write_bytes(buffer)
        return [True] * len(names)

    def close(self):
        pass
"""


@pytest.mark.parametrize("name", [*SMALL, *V4])
def test_a_plug_in_is_a_remote_store(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = tmp_path / "site"
    (site / "page_shelf-1.0.dist-info").mkdir(parents=True)
    (site / "page_shelf-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: page-shelf\nVersion: 1.0\n"
    )
    (site / "page_shelf-1.0.dist-info" / "entry_points.txt").write_text(
        "[headrace.page_stores]\nshelf = page_shelf:Store\n"
    )
    (site / "page_shelf.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(site))
    folder, options, prompts = save(name, tmp_path / "model")
    own = json.dumps({"folder": str(tmp_path)})
    with LLM(folder, skip_tokenizer=True, prefix_cache=False, **options) as llm:
        expected, _ = run(llm, prompts)
    options |= {"host_cache_gb": GB, "remote_cache": "shelf", "remote_cache_config": own}
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        assert run(llm, prompts)[0] == expected
        await_written(llm)
    with LLM(folder, skip_tokenizer=True, **options) as llm:
        tokens, cached = run(llm, prompts)
        assert tokens == expected and cached > 0 and llm.stats().tiers.storage.read_pages_total > 0
    with pytest.raises(ConfigError, match=r"no remote store 'cupboard'; known: .*shelf"):
        LLM(folder, skip_tokenizer=True, **options | {"remote_cache": "cupboard"})


def test_too_little_and_too_much_host_memory_are_refused(tmp_path: Path):
    folder, options, _ = save("Llama", tmp_path)
    with pytest.raises(ConfigError, match="leaves no room for a page"):
        LLM(folder, skip_tokenizer=True, host_cache_gb=1e-6, **options)
    with pytest.raises(ConfigError, match="lower it"):
        LLM(folder, skip_tokenizer=True, host_cache_gb=1e6, **options)
    with pytest.raises(ConfigError, match="leave out one"):
        LLM(folder, skip_tokenizer=True, host_cache_gb=GB, prefix_cache=False, **options)
