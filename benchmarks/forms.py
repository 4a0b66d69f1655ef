"""Models of benchmarks by name: ``MODEL`` is a folder under ``benchmarks/models``, or any other that has a config.json;
``MODEL:FORM`` the same with weights in one of `FORMS`. All have random weights.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gguf_model import write_model
from benchmarks.roofline import BF16, FP8_RATE, WeightCosts

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Form:
    """How weights are stored: ``config`` as checkpoints tell it (None: in a GGUF file that is written first)."""

    config: dict[str, Any] | None
    costs: WeightCosts = BF16


PLAIN = Form({})
FP8 = WeightCosts(linear=1, expert=1, rate=FP8_RATE)
INT4 = WeightCosts(linear=0.52, expert=0.52)
FORMS = {
    "fp8": Form({"quant_method": "fbgemm_fp8"}, FP8),
    "fp8-block": Form({"quant_method": "fp8", "weight_block_size": [128, 128]}, FP8),
    "gptq": Form({"quant_method": "gptq", "bits": 4, "group_size": 128}, INT4),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 128}, INT4),
    "mxfp4": Form({"quant_method": "mxfp4"}, WeightCosts(expert=0.53)),
    "q4_k_m": Form(None, WeightCosts(linear=0.6, expert=0.6, head=0.82)),
}
"""``fp8``: per output channel, rows of activations rounded while serving."""


def find_form(name: str) -> Form:
    """That of ``MODEL:FORM``; raises `SystemExit` for an unknown one."""
    form = name.partition(":")[2]
    if form and form not in FORMS:
        raise SystemExit(f"unknown form {form!r}; there are {', '.join(FORMS)}")
    return FORMS[form] if form else PLAIN


def model_folder(name: str) -> Path:
    """Where its config.json is."""
    folder = HERE / "models" / name.partition(":")[0]
    return folder if folder.exists() else Path(name.partition(":")[0])


def read_config(name: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Its config.json, with what ``config_overrides`` of engine options (JSON) change."""
    overrides = json.loads((options or {}).get("config_overrides", "{}"))
    return json.loads((model_folder(name) / "config.json").read_text()) | overrides


def engine_options(name: str) -> dict[str, Any]:
    """Options of an engine that serves it, the first of a GGUF form after its file is written (5 GB, temporary)."""
    form = find_form(name)
    if form.config is None:
        path = Path(tempfile.gettempdir()) / f"{name.replace(':', '-')}.gguf"
        if not path.exists():
            write_model(path)
        return {"model": str(path), "dtype": "bfloat16"}
    overrides = {"config_overrides": json.dumps({"quantization_config": form.config})} if form.config else {}
    return {"model": str(model_folder(name)), "load_format": "dummy", "dtype": "bfloat16", **overrides}


def join_options(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Engine options of both, of which only ``config_overrides`` may be in both: those are joined."""
    if both := first.keys() & second.keys() - {"config_overrides"}:
        raise SystemExit(f"a benchmark's model has its own {', '.join(sorted(both))}")
    overrides = [json.loads(options.get("config_overrides", "{}")) for options in (first, second)]
    joined = overrides[0] | overrides[1]
    return {**first, **second, **({"config_overrides": json.dumps(joined)} if joined else {})}


def build(name: str, options: dict[str, Any]) -> Any:
    """An `LLM` with such options and others."""
    from headrace import LLM

    return LLM(**join_options(engine_options(name), options))
