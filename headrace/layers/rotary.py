"""Rotary position tables, with all context-extension methods of `RopeScaling`.

Frequencies that depend on the sequence length (``dynamic``, ``longrope``) are fixed for the longest context served, so
that cached keys stay valid while a request grows, and shared prefixes are the same for all requests.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from headrace.layers.batch import ForwardBatch
from headrace.layers.spec import RopeScaling, RopeSpec

TWO_PI = 2 * math.pi


class RotaryTable(nn.Module):
    """``cos_sin`` [length, rotary_dim] float32: cosines of ``position * frequency`` in half of a row, then sines.
    ``length``: the longest context served, in tokens. ``regime``: what of it the frequencies depend on: keys are of use
    to tables of the same one alone; 0 for nothing."""

    query_scale: torch.Tensor | None

    def __init__(self, spec: RopeSpec, *, length: int, device: torch.device):
        super().__init__()
        self.regime = _regime(spec.scaling, length)
        factor = _attention_factor(spec.scaling)
        # [length, rotary_dim / 2] float32: half types cannot represent large positions exactly
        angles = torch.arange(length, dtype=torch.float32)[:, None] * _frequencies(spec, length)
        half = spec.rotary_dim // 2
        self.cos_sin = nn.Buffer(
            torch.empty(length, spec.rotary_dim, dtype=torch.float32, device=device), persistent=False
        )
        self.cos_sin[:, :half] = angles.cos().mul_(factor)
        self.cos_sin[:, half:] = angles.sin_().mul_(factor)  # in place: angles are not needed any more
        # [length] float32: what queries are multiplied by; None: nothing
        self.register_buffer("query_scale", _query_scale(spec.scaling, length, device), persistent=False)
        # [rotary_dim / 2], empty for tokens of one position each
        self.axes = nn.Buffer(
            torch.tensor(axis_of_frequencies(spec), dtype=torch.int64, device=device), persistent=False
        )

    def find(self, batch: ForwardBatch) -> torch.Tensor:
        """The rows to rotate by, which the batch's rope positions number."""
        return self.cos_sin if batch.rotations is None else batch.rotations

    def combine(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows [T, rotary_dim] float32 of tokens with ``positions`` [3, T] in time, height and width."""
        half = self.axes.shape[0]
        rows = positions.index_select(0, self.axes).T  # [T, half]
        columns = torch.arange(half, device=positions.device)
        return torch.cat((self.cos_sin[rows, columns], self.cos_sin[rows, columns + half]), dim=-1)


def find_regimes(model: nn.Module) -> list[int]:
    """Those of all tables of a model that depend on the longest context served."""
    return sorted({table.regime for table in model.modules() if isinstance(table, RotaryTable)} - {0})


def axis_of_frequencies(spec: RopeSpec) -> list[int]:
    """Which axis of positions each frequency rotates by. Contiguous: Qwen2-VL, arXiv:2409.12191, section 2.1."""
    if not spec.alternates_sections:
        return [axis for axis, count in enumerate(spec.sections) for _ in range(count)]
    return [i % 3 if i < 3 * spec.sections[i % 3] else 0 for i in range(spec.rotary_dim // 2)]


def _plain_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """``theta ** (-2i / rotary_dim)``, float32 [rotary_dim / 2]. Su et al., arXiv:2104.09864, equation 15."""
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _frequencies(spec: RopeSpec, length: int) -> torch.Tensor:
    scaling = spec.scaling
    plain = _plain_frequencies(spec.theta, spec.rotary_dim)
    if scaling is None or scaling.kind == "default":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "dynamic":
        return _dynamic_frequencies(spec, scaling, length)
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn_frequencies(plain, spec, scaling)
    return _longrope_frequencies(plain, scaling, length)


def _regime(scaling: RopeScaling | None, length: int) -> int:
    """See `RotaryTable`: as `_dynamic_frequencies` and `_longrope_frequencies` read ``length``."""
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return 0
    original = scaling.original_max_position
    return max(length, original) if scaling.kind == "dynamic" else original + (length > original)


def _dynamic_frequencies(spec: RopeSpec, scaling: RopeScaling, length: int) -> torch.Tensor:
    """NTK-aware base change beyond the trained length, for the longest context served."""
    stretch = scaling.factor * max(1.0, length / scaling.original_max_position) - (scaling.factor - 1)
    theta = spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))
    return _plain_frequencies(theta, spec.rotary_dim)


def _llama3_frequencies(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Low frequencies are divided by ``factor``, high ones unchanged, others blended (Llama 3.1's model card)."""
    turns = scaling.original_max_position * plain / TWO_PI  # rotations within the trained length, per frequency
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return plain * keep + plain / scaling.factor * (1 - keep)


def _yarn_frequencies(plain: torch.Tensor, spec: RopeSpec, scaling: RopeScaling) -> torch.Tensor:
    """Blend by the number of rotations within the trained length. Peng et al., arXiv:2309.00071, section 3.2."""

    # the index, as a real number, of the frequency that makes so many rotations within the trained length
    def dim_with_turns(turns: float) -> float:
        return spec.rotary_dim * math.log(scaling.original_max_position / (turns * TWO_PI)) / (2 * math.log(spec.theta))

    low, high = dim_with_turns(scaling.beta_fast), dim_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)  # frequencies up to `low` stay, from `high` on are divided
    ramp = (torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolate = ramp.clamp(0, 1)
    return plain / scaling.factor * interpolate + plain * (1 - interpolate)


def _longrope_frequencies(plain: torch.Tensor, scaling: RopeScaling, length: int) -> torch.Tensor:
    """Per-frequency divisors, one set within the trained length and one beyond. Ding et al., arXiv:2402.13753."""
    factors = scaling.long_factor if length > scaling.original_max_position else scaling.short_factor
    return plain / torch.tensor(factors, dtype=torch.float32)


def _query_scale(scaling: RopeScaling | None, length: int, device: torch.device) -> torch.Tensor | None:
    """Keeps attention sharp over many tokens, as of Llama 4 and Ministral 3: see `RopeScaling`."""
    if scaling is None or not scaling.query_growth:
        return None
    windows = torch.arange(length, dtype=torch.float32) / scaling.original_max_position
    return windows.floor_().log1p_().mul_(scaling.query_growth).add_(1.0).to(device)


def _attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of cos and sin that keeps attention sharp over an extended context."""
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn" and scaling.factor > 1:
        return 0.1 * math.log(scaling.factor) + 1.0
    if scaling.kind == "longrope" and scaling.factor > 1:
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))
    return 1.0
