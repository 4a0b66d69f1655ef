"""What schemes serve; asked before one is imported."""

from __future__ import annotations

from collections.abc import Callable

from headrace.layers.quantization.contract import SchemeQuery

Predicate = Callable[[SchemeQuery], str | None]


def stored_as(*methods: str) -> Predicate:
    """For a checkpoint form: where config.json says one of these, or nothing."""

    def reason_against(query: SchemeQuery) -> str | None:
        return None if query.stored in ("", *methods) else f"reads {' and '.join(methods)}, not {query.stored}"

    return reason_against


CPU_TYPES = ("float32", "bfloat16")


def made_for_cpu(name: str) -> Predicate:
    """For what is made of plain weights on a CPU, where the user wants it."""

    def reason_against(query: SchemeQuery) -> str | None:
        if query.wanted != name:
            return f"serves {name} alone"
        if query.device != "cpu":
            return (
                f"{name} is made at load on a CPU only; take --device cpu, or a checkpoint that is quantised for "
                f"{query.device} (fp8, mxfp4)"
            )
        return (
            None if query.dtype in CPU_TYPES
            else f"{name} multiplies {' and '.join(CPU_TYPES)}, not {query.dtype}; take --dtype auto"
        )

    return reason_against


def called(name: str) -> Predicate:
    """For a scheme of another package: where the checkpoint or the user calls it by its name."""

    def reason_against(query: SchemeQuery) -> str | None:
        return None if name in (query.stored, query.wanted) else f"serves {name} alone"

    return reason_against
