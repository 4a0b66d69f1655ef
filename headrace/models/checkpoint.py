"""`open_weights`: a model's tensors under their checkpoint names, whichever format its files are in."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from headrace.base.errors import ConfigError
from headrace.layers.narrowing import Narrowing
from headrace.layers.spec import DecoderSpec
from headrace.models.catalog import find_gguf_family
from headrace.models.family import Family
from headrace.models.source import ModelSource
from headrace.models.weights.device_copy import copy_ahead
from headrace.models.weights.files import map_file, view_bytes
from headrace.models.weights.gguf_naming import name_tensors
from headrace.models.weights.gguf_tensors import holds_blocks, read_tensors
from headrace.models.weights.safetensors_file import StoredTensor, read_header, read_safetensors

MAX_THREADS = 16
COMPARED_BYTES = 1 << 24
"""At a time, so that tensors which differ are soon known to."""

S = TypeVar("S")

logger = logging.getLogger(__name__)


def has_blocks(source: ModelSource) -> bool:
    """Whether the files have, or are said to have, quantised weights that layers may keep as blocks."""
    return holds_blocks(source.gguf_tensors) or bool(source.config.get("quantization_config"))


def weigh_layers(source: ModelSource, family: Family, count: int) -> tuple[list[int], int]:
    """How much of the weights is in each of ``count`` layers, and in the head: a step reads all of these. In bytes as
    stored, or numbers for a GGUF file. The number of a layer is the first one in a tensor's name. An encoder of media
    is not counted: each stage has it."""
    if source.kind == "gguf":
        named = name_tensors(source.gguf_tensors, source.gguf_metadata, family.gguf_naming)
        sizes = [(tensor.name, math.prod(tensor.stored.shape)) for tensor in named]
    else:
        sizes = [(t.name, t.stop - t.start) for path in source.weight_files for t in read_header(path)]
    layers, rest = [0] * count, dict[str, int]()
    media = tuple(
        theirs.partition("{i}")[0] for theirs, ours in family.names.modules.items() if ours.startswith("encoder.")
    )
    for name, size in sizes:
        if family.names.rename_one(name).startswith(media):
            continue
        number = next((int(part) for part in name.split(".") if part.isascii() and part.isdigit()), None)
        if number is None:
            name = family.names.rename_one(name).rpartition(".")[0]
            rest[name] = rest.get(name, 0) + size
        elif number < count:
            layers[number] += size
    by_part = {
        ours.rpartition(".")[2]: rest[theirs] for theirs, ours in family.names.modules.items() if theirs in rest
    }
    return layers, by_part.get("head", by_part.get("embedding", 0) if family.generates else 0)


def untie(source: ModelSource, family: Family, spec: S) -> S:
    """``spec`` with a head of its own where the files have one that differs from the embedding. So does transformers 5:
    by its defaults, configs of InternVL and Mistral 3 say that the two are tied, whether they are or not."""
    if source.kind != "folder" or not isinstance(spec, DecoderSpec) or not spec.vocabulary.tied:
        return spec
    stored = dict[str, tuple[Path, StoredTensor]]()
    for path in source.weight_files:
        for tensor in read_header(path):
            module, _, kind = family.names.rename_one(tensor.name).rpartition(".")
            ours = family.names.modules.get(module, "")
            if kind == "weight" and ours in ("embedding", "head"):
                stored[ours] = path, tensor
    if "embedding" not in stored or "head" not in stored or _is_same(stored["embedding"], stored["head"]):
        return spec
    logger.warning(
        "config.json says tie_word_embeddings, and %s has other numbers than the embedding: it is a head of its own",
        stored["head"][1].name,
    )
    return replace(spec, vocabulary=replace(spec.vocabulary, tied=False))


def _is_same(one: tuple[Path, StoredTensor], other: tuple[Path, StoredTensor]) -> bool:
    """Whether two tensors of one form have the same bytes; those of different forms are not compared."""
    (_, first), (_, second) = one, other
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return True
    views = [view_bytes(map_file(path), own.start, own.stop - own.start, 1) for path, own in (one, other)]
    return all(map(torch.equal, *(view.split(COMPARED_BYTES) for view in views)))


def open_weights(
    source: ModelSource, *, load_format: str = "auto", device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None, keeps_blocks: bool = False, wants: Callable[[str], bool] | None = None,
    narrowing: Narrowing | None = None,
) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield every ``(checkpoint name, tensor)`` of a model whose name ``wants`` accepts (None: all); each tensor is
    valid until the next one is requested. With ``narrowing``, parts of tensors that the other ranks need are neither
    read nor copied.

    On a CPU, tensors are views of memory-mapped files in their stored dtype. Quantised GGUF tensors are dequantised to
    ``dtype`` (None: float32) or, with ``keeps_blocks``, yielded as `BlockTensor`. On a CUDA device, tensors arrive
    there, copied through pinned memory ahead of the consumer. Raises `WeightError` for a truncated or corrupt file,
    `ConfigError` when ``load_format`` is not the format of the files.
    """
    if load_format not in ("auto", "safetensors" if source.kind == "folder" else "gguf"):
        raise ConfigError(
            f"load_format is {load_format}, but {source.path} is a {source.kind}; leave it at auto", param="load_format"
        )
    device, threads = torch.device(device), max(1, min(MAX_THREADS, torch.get_num_threads()))
    if source.kind == "gguf":
        family = find_gguf_family(source.gguf_metadata["general.architecture"])
        named = name_tensors(source.gguf_tensors, source.gguf_metadata, family.gguf_naming)
        named = [tensor for tensor in named if wants is None or wants(tensor.name)]
        find_cut = None if narrowing is None else narrowing.find_cut
        tensors = read_tensors(named, dtype=dtype, threads=threads, keeps_blocks=keeps_blocks, find_cut=find_cut)
    else:
        tensors = read_safetensors(source.weight_files)
        if wants is not None:  # views of mapped files: those left out are not read
            tensors = (pair for pair in tensors if wants(pair[0]))
    if narrowing is not None:
        tensors = narrowing.keep(tensors)
    # blocks are decoded on the device, by the layers that keep their codes
    is_copied = device.type == "cuda" and not (keeps_blocks and source.kind == "gguf")
    return copy_ahead(tensors, device, threads=threads) if is_copied else tensors
