"""The keys of ``--speculative-config``: what is taken, what is refused, and what the errors say."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headrace.base.config import EngineConfig, SpeculationConfig, engine_config
from headrace.base.errors import ConfigError, PluginError
from headrace.base.registry import Registry
from headrace.base.speculation import DEVICE_METHODS, METHODS, SpeculativeOptions, parse_speculative_config
from headrace.scheduling.speculation import drafter
from headrace.scheduling.speculation.drafter import ENTRY_POINT_GROUP, TEXT_DRAFTERS
from headrace.service.inventory import Machine, take_inventory


def test_the_default_is_no_drafts_and_that_of_a_config_auto():
    assert parse_speculative_config(None) == SpeculativeOptions(method="off")
    assert engine_config(model="x").speculation.options.method == "off"
    options = engine_config(model="x", speculative_config="{}").speculation.options
    assert (options.method, options.num_fixed, options.lookup) == ("auto", None, (5, 5))


def test_options_reach_the_engine_as_text_or_as_a_dict():
    stated = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 6}
    for given in (stated, json.dumps(stated)):
        config = engine_config(speculative_config=given)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
        assert sent.speculation.options == SpeculativeOptions(**stated)
        assert sent.speculation.options.num_fixed == 4
        assert sent.speculation.options.lookup == (6, 6)


def test_a_number_is_a_maximum_for_auto_and_fixed_for_a_method():
    assert SpeculativeOptions(method="auto", num_speculative_tokens=3).num_fixed is None
    assert SpeculativeOptions(method="suffix", num_speculative_tokens=3).num_fixed == 3
    assert SpeculativeOptions(method="suffix").num_fixed is None


@pytest.mark.parametrize(("stated", "words"), [
    ("{", ["speculative_config is no JSON"]),
    ("[1]", ["must be a JSON object"]),
    ({"method": "suffx"}, ["unknown method 'suffx'", "did you mean suffix?", "ngram", "eagle3"]),
    ({"method": "medusa"}, ["unknown method 'medusa'", "not served", "known: auto, off"]),
    ({"method": "deepseek_mtp"}, ["method mtp"]),
    ({"methd": "ngram"}, ["no key 'methd'", "did you mean method?"]),
    ({"num_tokens_of_mine": 3}, ["no key 'num_tokens_of_mine'"]),
    ({"draft_tensor_parallel_size": 1}, ["draft_tensor_parallel_size is not supported", "ranks of the served model"]),
    ({"disable_by_batch_size": 8}, ["not supported", "measured"]),
    ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "from 1 to 32"]),
    ({"num_speculative_tokens": 33}, ["num_speculative_tokens", "from 1 to 32"]),
    ({"num_speculative_tokens": "4"}, ["num_speculative_tokens takes an integer"]),
    ({"num_speculative_tokens": True}, ["num_speculative_tokens takes an integer"]),
    ({"suffix_decoding_min_token_prob": float("nan")}, ["suffix_decoding_min_token_prob takes a finite number"]),
    ({"suffix_decoding_max_tree_depth": 0}, ["suffix_decoding_max_tree_depth", "from 1 to 256"]),
    ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, ["prompt_lookup_min (5)", "(3)"]),
    ({"method": "eagle3"}, ["method eagle3 needs model"]),
    ({"method": "mtp", "model": "x"}, ["method mtp takes no model"]),
    ({"method": "bench", "num_speculative_tokens": 4}, ["needs acceptance_rate"]),
    ({"method": "suffix", "acceptance_rate": 0.5}, ["acceptance_rate belongs to method bench"]),
    ({"load_format": "pickle"}, ["load_format must be one of"]),
], ids=str)
def test_what_is_wrong_is_named(stated: object, words: list[str]):
    text = stated if isinstance(stated, str) else json.dumps(stated)
    with pytest.raises(ConfigError) as caught:
        SpeculationConfig(speculative_config=text)
    message = str(caught.value)
    assert message.startswith("speculative_config")
    assert str(caught.value.param).startswith("speculative_config")
    assert all(word in message for word in words), message
    assert "bench," not in message and "acceptance_rate," not in message  # not offered to users


def test_deep_json_is_refused():
    with pytest.raises(ConfigError, match="no JSON"):
        parse_speculative_config("[" * 100_000)


def test_methods_are_those_that_exist():
    """Each text method is a registered drafter, under the entry-point group that the options look names up in."""
    text = set(METHODS) - set(DEVICE_METHODS) - {"auto", "off"}
    assert text == {entry.name for entry in TEXT_DRAFTERS if not entry.is_out_of_tree}
    from headrace.base.speculation import ENTRY_POINT_GROUPS

    assert ENTRY_POINT_GROUP in ENTRY_POINT_GROUPS


DRAFTER = """
class Echo:
    {plugin_api}
    def __init__(self, options):
        self.texts = {{}}
    def start(self, key, token_ids, *, is_private=False):
        self.texts[key] = list(token_ids)
    def append(self, key, token_ids):
        self.texts[key] += token_ids
    def propose(self, key, most, continuation=()):
        return self.texts[key][-1:] * most, [0.5] * most
    def stop(self, key):
        del self.texts[key]
"""


def test_an_out_of_tree_method_is_known_made_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = ["[headrace.drafters]", "echo = echo_drafter:Echo", "old = old_drafter:Echo", "gone = no_such_module:X"]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "echo_drafter.py").write_text(DRAFTER.format(plugin_api="plugin_api = 1"))
    (tmp_path / "old_drafter.py").write_text(DRAFTER.format(plugin_api=""))
    with pytest.raises(ConfigError, match="unknown method 'echo'"):
        parse_speculative_config('{"method": "echo"}')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(drafter, "TEXT_DRAFTERS", Registry("text drafter"))
    options = parse_speculative_config('{"method": "echo"}')
    made = drafter.make_text_drafter(options.method, options)
    made.start(0, [1, 2])
    assert made.propose(0, 2) == ([2, 2], [0.5, 0.5])
    with pytest.raises(PluginError, match="does not say for which plug-in API"):
        drafter.make_text_drafter("old", options)
    with pytest.raises(PluginError, match="no_such_module"):
        drafter.make_text_drafter("gone", options)
    found = {f.name: f.status for f in take_inventory(Machine((("cpu", "float32", (0, 0)),), {}))
             if f.kind == "text drafter"}
    assert found == {"echo": "ok", "old": "broken", "gone": "broken"}
