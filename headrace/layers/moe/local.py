"""`LocalDispatcher`: all experts are here, so no token moves."""

from __future__ import annotations

import torch

from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens


class LocalDispatcher:
    """See `Dispatcher`; speaks `CHOICES`."""

    def __init__(self, build: Build):
        pass

    def dispatch(self, tokens: ChosenTokens) -> ChosenTokens:
        return tokens

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return results
