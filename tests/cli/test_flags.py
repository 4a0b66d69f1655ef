"""Flags come from documented options alone; wrong ones are explained; every value's source is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError
from headrace.base.option import options_of
from headrace.base.peer_options import ANSWERS
from headrace.base.server_config import ServerConfig
from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import build_parser, command_options, describe, parse_command, value_name
from headrace.serving.cli.options import SamplingOptions
from headrace.serving.cli.serve import effective_options, serve_config

GOLDEN = Path(__file__).parent / "flags.golden"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_NUM_THREADS", "HEADRACE_API_KEY", "HEADRACE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


def list_flags() -> str:
    lines = ["# Every flag of every command. Users' scripts depend on them: change one on purpose only.",
             "# Write this file anew with: python tests/cli/test_flags.py"]
    for command in COMMANDS.values():
        lines += ["", f"[{command.name}]"]
        lines += [
            f"{info.flag} {value_name(info) if info.type is not bool else '(on/off)'} = {info.default}"
            for info in command_options(command)
        ]
    return "\n".join(lines) + "\n"


def test_flags_are_frozen():
    assert list_flags() == GOLDEN.read_text(), "flags changed; if that is meant: python tests/cli/test_flags.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_few_documented_and_distinct(name: str):
    infos = command_options(COMMANDS[name])
    assert len(infos) < 114  # adapters, tiers, hot slots and media came with bounds that operators set
    assert len({info.name for info in infos}) == len(infos)
    for info in infos:
        assert info.doc and len(info.doc) > 8, info.name
        assert not info.doc[0].isupper() or info.doc.split()[0].isupper() or info.doc.startswith(
            ("JSON", "TOML", "CPU", "KV", "Jinja")
        ), info.doc
    for kind in COMMANDS[name].section_types().values():
        assert kind.__doc__


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_flag_default_and_choice(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    command = COMMANDS[name]
    raw = build_parser(command).format_help()
    assert max(map(len, raw.splitlines())) <= 120
    text = " ".join(raw.split())
    for info in command_options(command):
        assert info.flag in text
        assert describe(info) in text
        for choice in info.choices or ():
            assert str(choice) in text
    for title in command.section_types():
        assert f"{title}:" in text
    for _, example in command.examples:
        assert example in raw


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_parsed(name: str):
    import shlex

    command = COMMANDS[name]
    for _, example in command.examples:
        words = shlex.split(example.rpartition("| ")[2])
        assert words[: 1 + len(name.split())] == ["headrace", *name.split()]
        argv = [w for w in words[1 + len(name.split()):] if not w.endswith(".toml") and w != "--config"]
        parse_command(command, argv)


def test_values_are_typed_and_named_by_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HEADRACE_API_KEY", "secret")
    path = tmp_path / "o.toml"
    path.write_text(
        'port = 9001\nhost = "::1"\nnum-requests = 5\n[cache]\npage-size = 32\n[scheduler]\nmax_queued = 7\n'
    )
    argv = [
        "some-model", "--config", str(path), "--port", "9002", "--no-prefix-cache", "--memory-fraction", "0.5",
        "--drain-s", "3"
    ]
    invocation = parse_command(COMMANDS["serve"], argv)
    config = serve_config(invocation)
    assert (config.engine.model.model, config.server.port, config.server.host) == ("some-model", 9002, "::1")
    assert (
        config.engine.cache.page_size, config.engine.cache.prefix_cache, config.engine.scheduler.max_queued
    ) == (32, False, 7)
    assert (config.engine.device.threads, config.server.api_key, config.server.drain_s) == (3, "secret", 3.0)
    assert config.sources == {
        "model": "flag", "port": "flag", "prefix_cache": "flag", "memory_fraction": "flag", "drain_s": "flag",
        "host": f"file {path}",
        "page_size": f"file {path}", "max_queued": f"file {path}", "threads": "environment OMP_NUM_THREADS",
        "api_key": "environment HEADRACE_API_KEY",
    }
    shown = {row["name"]: row for row in effective_options(parse_command(COMMANDS["show-config"], argv))}
    assert shown["api_key"]["value"] == "***"
    assert (shown["policy"]["value"], shown["policy"]["source"]) == ("fcfs", "default")
    assert set(shown) >= {info.name for info in options_of(ServerConfig)}


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert parse_command(COMMANDS["serve"], ["--threads", "2"]).section("device").threads == 2
    assert parse_command(COMMANDS["serve"], ["--threads", "none"]).section("device").threads is None


def test_json_files_and_lists(tmp_path: Path):
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"sampling": {"stop": ["a"], "temperature": 1}, "model": "m"}))
    invocation = parse_command(COMMANDS["generate"], ["one", "two", "--config", str(path)])
    assert (
        invocation.section("sampling").stop, invocation.section("sampling").temperature, invocation.words
    ) == (["a"], 1.0, ["one", "two"])
    assert invocation.given_in(("model",)) == {"model": "m"}
    assert parse_command(COMMANDS["generate"], ["--stop", "x", "--stop", "y"]).given["stop"] == ["x", "y"]


@pytest.mark.parametrize(("command", "argv", "message"), [
    ("serve", ["--max-model-lenn", "5"], "did you mean --max-model-len?"),
    ("serve", ["--max_model_len", "64"], "did you mean --max-model-len?"),
    ("serve", ["--no-prefix-cach"], "did you mean --no-prefix-cache?"),
    ("serve", ["--xyzzy"], "--help lists"),
    ("serve", ["--max-num-seqs", "4"], "here it is --max-running-requests"),
    ("serve", ["--enforce-eager"], "set --graphs to off"),
    ("serve", ["--disable_radix_cache"], "use --no-prefix-cache"),
    ("serve", ["-tp=2"], "here it is --tensor-parallel-size"),
    ("router", ["--max-num-seqs", "4"], "--help lists"),
    ("serve", ["--port", "http"], "--port takes a whole number"),
    ("serve", ["--port", "99999"], "from 0 to 65535"),
    ("serve", ["--port"], "--port: needs a value"),
    ("serve", ["--memory-fraction", "lots"], "--memory-fraction takes a number"),
    ("serve", ["--dtype", "bf16"], "one of auto, float32, bfloat16, float16"),
    ("serve", ["a", "--model", "b"], "given twice"),
    ("serve", ["a", "b"], "unexpected argument 'b'"),
    ("check", ["--strict=yes"], "--strict/--no-strict: takes no value"),
    ("serve", ["--config", "missing.toml"], "cannot read missing.toml"),
])
def test_wrong_flags_are_explained(command: str, argv: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        parse_command(COMMANDS[command], argv)
    assert message in str(caught.value)


def test_options_of_other_servers_are_explained_in_our_own_words():
    serve = {info.name for info in command_options(COMMANDS["serve"])}
    named = {name for answer in ANSWERS.values() for name in re.findall(r"{(\w+)}", answer)}
    assert {name.removeprefix("no_") if name not in serve else name for name in named} <= serve
    # what is an option here, too, is never explained
    assert not serve & set(ANSWERS)
    with pytest.raises(ConfigError, match="use prefix_cache=False"):
        engine_config(disable_radix_cache=True)


def test_the_table_of_other_servers_options_agrees_with_the_errors():
    table = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text()
    rows = re.findall(r"^\| `--([\w-]+)[^|]*\| `--([\w-]+)[^|]*\| `--([\w-]+)", table, re.MULTILINE)
    assert len(rows) > 15
    serve = {info.name for info in command_options(COMMANDS["serve"])}
    serve |= {info.alias.replace("-", "_") for info in command_options(COMMANDS["serve"]) if info.alias}
    for vllm, sglang, ours in [[name.replace("-", "_") for name in row] for row in rows]:
        for theirs in {vllm, sglang} - serve:
            assert f"{{{ours}}}" in ANSWERS[theirs], theirs


def test_a_second_name_of_an_option_is_one_everywhere(tmp_path: Path):
    config = engine_config(kv_cache_dtype="int8", tp=2, dp=3)
    assert (config.cache.kv_dtype, config.parallel.data_parallel_size) == ("int8", 3)
    with pytest.raises(ConfigError, match="kv_cache_dtype is another name of kv_dtype"):
        engine_config(kv_cache_dtype="int8", kv_dtype="auto")
    path = tmp_path / "o.toml"
    path.write_text("tp = 2")
    assert parse_command(COMMANDS["serve"], ["--config", str(path)]).section("parallel").tensor_parallel_size == 2


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.toml", "port = ", "not valid TOML"), ("a.json", "[1]", "must hold an object"),
    ("a.json", "{", "not valid JSON"),
    ("a.toml", "prot = 1", "did you mean port?"), ("a.toml", "port = 'x'", "port takes an integer"),
])
def test_wrong_files_are_explained(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse_command(COMMANDS["serve"], ["--config", str(tmp_path / name)])
    assert message in str(caught.value)


def test_sampling_falls_back_to_the_models_defaults():
    options = SamplingOptions(temperature=0.5, stop=["x"])
    params = options.to_params({"temperature": 0.9, "top_p": 0.8}, n=2)
    assert (params.temperature, params.top_p, params.stop, params.n, params.max_tokens) == (0.5, 0.8, ["x"], 2, 256)


if __name__ == "__main__":
    GOLDEN.write_text(list_flags())
