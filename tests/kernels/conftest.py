"""Triton kernels run on a GPU where there is one, else in Triton's interpreter (chosen in tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def _let_interpreter_loop_over_loaded_bounds() -> None:
    """The interpreter makes a loop bound of a one-element array by ``int(array)``, which NumPy 2.4 refuses."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if not HAS_GPU:
    _let_interpreter_loop_over_loaded_bounds()


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreted: runs a kernel in Triton's interpreter; skipped where a GPU runs it")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("interpreted") and HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="the GPU runs the same test"))
