"""Choose whether experts stay in codes on a GPU: both ways are timed once for each shape, then cached in a file.

X experts, D hidden size, F expert intermediate size, T tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.base import env
from headrace.kernels.coded_linear.choice import MOST_ERROR, find_faults
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.kernels.cuda_source import note_fallback
from headrace.kernels.measured import MeasuredFile
from headrace.kernels.moe import (
    CODED_EXPERTS,
    MANY_CODED_EXPERTS,
    MOST_CODED_PAIRS_EACH,
    ROUNDED_EXPERTS,
    RUN_EXPERTS,
    is_few,
)
from headrace.kernels.operation import KernelQuery, choose_fused
from headrace.kernels.precompile import is_dry_run, precompile
from headrace.kernels.timing import time_on_gpu
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.moe.rounded import check_rounded

logger = logging.getLogger(__name__)

TOKENS = (1, 4, 16, 64, 256)
"""Steps that are measured. Experts stay in codes where that is faster on the average, relative to plain ones."""
WARM_TOKENS = (1, 2, 4, 5, 8, 16, 17, *(1 << power for power in range(5, 14)))
"""Steps with every tile of the kernels between them."""


@torch.no_grad()
def keep_faster_experts(model: nn.Module, time: Callable[[Callable[[], Any]], float] | None = None) -> None:
    """Dequantise the experts of a model that are in codes and slower so, if there is memory for them; not those whose
    activations are rounded. ``time``: measures a call on the device, in seconds. Raises `ConfigError` for experts whose
    activations shall be rounded and cannot."""
    gains: dict[str, float] = {}
    measured = MeasuredFile(env.cache_dir() / "coded_experts.json")
    for module in model.modules():
        if not isinstance(module, MoeMlp):
            continue
        stacks = (module.experts.gate_up, module.experts.down)
        if stacks[0].is_rounded:
            _prepare_rounded(module, gains)
            continue
        if not all(isinstance(stack.stored, CodedWeight) for stack in stacks):
            continue
        key = _describe(module)
        if key not in gains:
            known = measured.find(key)
            is_known = isinstance(known, float) and known < math.inf
            gains[key] = known if is_known else _measure(module, key, time or time_on_gpu)
            if 0.0 < gains[key] < math.inf:  # what did not run, or did not fit, may do so at the next start
                measured.put(key, gains[key])
            logger.info(
                "experts of %s: %s (%.2f times as fast as plain for few tokens)", key.partition(": ")[2],
                "kept in codes" if gains[key] > 1.0 else "dequantised", gains[key]
            )
            if gains[key] > 1.0:
                _warm_up(module, key)
        if gains[key] <= 1.0:
            for stack in stacks:
                stack.restore()
    measured.save()


def _prepare_rounded(module: MoeMlp, gains: dict[str, float]) -> None:
    """Of experts that keep their codes; ``gains`` has shapes whose kernels are compiled."""
    check_rounded((module.experts.gate_up, module.experts.down))
    key = _describe(module)
    if key not in gains:
        _warm_up(module, key)
    gains[key] = math.inf


def _describe(module: MoeMlp) -> str:
    codes = module.experts.gate_up.codes
    width, inner = module.experts.gate_up.codes.in_features, module.experts.down.codes.in_features
    device, query = codes.codes.device, _query(module)
    # measured again by versions that have other kernels
    names = " ".join(name for name in CODED_EXPERTS.names() if CODED_EXPERTS.reason_against(name, query) is None)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return (
        f"{machine}, torch {torch.__version__}: {module.experts.gate_up.num_stacked} x {width} x {inner} in "
        f"{codes.code.value}, scales of {codes.rows} x {codes.group}, {module.router.shape['top_k']} a token, "
        f"{module.gate}, by {names}"
    )


def _query(module: MoeMlp) -> KernelQuery:
    device = module.experts.gate_up.codes.codes.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return KernelQuery(device.type, str(module.dtype).removeprefix("torch."), capability)


def _bind_codes(module: MoeMlp) -> partial[torch.Tensor]:
    """The kernel for experts in codes, which takes a step of `_draw_step`."""
    gate_up, down = module.experts.gate_up, module.experts.down
    operation = ROUNDED_EXPERTS if module.experts.gate_up.is_rounded else CODED_EXPERTS
    return partial(
        operation.choose(_query(module)), gate_up=(gate_up.codes, gate_up.own_bias),
        down=(down.codes, down.own_bias), gate=module.gate
    )


def _warm_up(module: MoeMlp, about: str) -> None:
    """Compile what steps of any size run with codes: nothing is to compile later."""
    coded, codes = _bind_codes(module), module.experts.gate_up
    device, top_k = codes.codes.codes.device, module.router.shape["top_k"]
    if device.type != "cuda":
        return
    steps = [_draw_step(module, num_tokens, device, module.dtype) for num_tokens in WARM_TOKENS]
    many = coded.func if codes.is_rounded else choose_fused(MANY_CODED_EXPERTS, _query(module))

    def run() -> None:
        for step in steps:
            if is_few(len(step[0]), top_k, codes.num_stacked, MOST_CODED_PAIRS_EACH):
                coded(*step)
            elif many is not None:
                many(*step, **coded.keywords)

    precompile(run, f"coded experts of all sizes {about}", device)
    run()


def _measure(module: MoeMlp, about: str, time: Callable[[Callable[[], Any]], float]) -> float:
    """The mean over `TOKENS` of plain experts' time over that of coded ones; infinite where plain ones do not fit."""
    gate_up, down = module.experts.gate_up, module.experts.down
    device, dtype, coded = gate_up.codes.codes.device, module.dtype, _bind_codes(module)
    try:
        plain = partial(
            RUN_EXPERTS.choose(_query(module)), gate_up=(gate_up.unpack(dtype), gate_up.own_bias),
            down=(down.unpack(dtype), down.own_bias), gate=module.gate
        )
    except torch.OutOfMemoryError:
        return math.inf
    steps = [_draw_step(module, num_tokens, device, dtype) for num_tokens in TOKENS]

    def run() -> None:
        for step in steps:
            for experts in (coded, plain):
                with suppress(*find_faults()):
                    experts(*step)

    precompile(run, f"coded experts {about}", device)
    if is_dry_run():  # nothing can be measured
        return math.inf
    gains = []
    for step in steps:
        expected = plain(*step).float()
        try:
            out = coded(*step).float()
        except find_faults() as error:
            note_fallback("kernels for experts in codes do not run here; they are dequantised", error)
            return 0.0
        if not float((out - expected).norm()) <= MOST_ERROR * float(expected.norm()):
            logger.warning("kernels for experts in codes give other numbers than plain ones; they are dequantised")
            return 0.0
        gains.append(time(partial(plain, *step)) / time(partial(coded, *step)))
    return sum(gains) / len(gains)


def _draw_step(
    module: MoeMlp, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens [T, D], choices and weights [T, k]."""
    num_experts, top_k = module.experts.gate_up.num_stacked, min(
        module.router.shape["top_k"], module.experts.gate_up.num_stacked
    )
    x = torch.randn(num_tokens, module.experts.gate_up.codes.in_features, device=device).to(dtype)
    ids = torch.rand(num_tokens, num_experts, device=device).topk(top_k).indices
    return x, ids, torch.rand(num_tokens, top_k, device=device)
