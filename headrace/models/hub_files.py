"""Which files of a Hugging Face repository make up a model: the choice among safetensors, GGUF files and pickles. Works
on names alone, those on the hub or those of a cached copy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.base.errors import ModelError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(/[\w.-]+\.gguf|:[\w.-]+)?")
"""``owner/name`` or ``name``. Of a repository with several GGUF files, ``owner/name/FILE.gguf`` names one, and
``owner/name:Q4_K_M`` that of a quantization."""

USUAL_TAG = "Q4_K_M"
"""Taken from a repository with several GGUF files when none is named: what llama.cpp and Ollama take."""
SPLIT_GGUF = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_MODULE_FILE = re.compile(r"\d+_\w+/[^/]+")  # of sentence-transformers: 1_Pooling/config.json
_SUPPORTING = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NO_MODEL = ("mmproj", "imatrix")  # GGUF files that hold something else
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


_ADDRESS = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/")


@dataclass(frozen=True)
class HubName:
    """A parsed name: the repository, and the ``file`` or the quantization ``tag`` wanted of its GGUF files."""

    repository: str
    file: str | None = None
    tag: str | None = None


def parse_name(name: str) -> HubName:
    """A name of the form `HUB_NAME`."""
    if name.count("/") == 2:
        repository, _, file = name.rpartition("/")
        return HubName(repository, file)
    repository, _, tag = name.partition(":")
    return HubName(repository, None, tag or None)


def read_name(typed: str) -> str:
    """A name of the form `HUB_NAME`, also from the address of a model's page; raises `ModelError` for another form."""
    name = _ADDRESS.sub("", typed.strip()).removesuffix("/").removesuffix("/tree/main")
    if not HUB_NAME.fullmatch(name) or set(name.split("/")) & {".", ".."}:
        raise ModelError(
            f"{typed!r} is no name on the Hugging Face hub: give OWNER/NAME, or for one of several GGUF files "
            "OWNER/NAME/FILE.gguf or OWNER/NAME:Q4_K_M"
        )
    return name


@dataclass(frozen=True)
class Chosen:
    """``weights`` are the files to read; ``entry`` is the GGUF file to open (the first of a split one), None for the
    repository's folder."""

    weights: tuple[str, ...]
    entry: str | None = None


def choose_weights(names: Iterable[str], wanted: HubName) -> Chosen:
    """The weights of a model in a repository that has the files ``names``. safetensors come first unless a GGUF file
    is named. Raises `ModelError` when there are none, or several with nothing to choose by."""
    names = list(names)
    tensors = _choose_safetensors(names)
    if tensors and wanted.file is None and wanted.tag is None:
        return Chosen(tensors)
    ggufs = group_ggufs(names)
    if not ggufs:
        raise ModelError(_no_weights(names, wanted.repository))
    found = _choose_gguf(sorted(ggufs), wanted)
    if found is None:
        first = min(ggufs)
        raise ModelError(
            f"name one of the GGUF files of {wanted.repository}, as in "
            f"{wanted.repository + '/' + first if '/' not in first else wanted.repository + ':TAG'}; it has "
            f"{', '.join(sorted(ggufs)[:24])}"
        )
    return Chosen(ggufs[found], found)


def supporting_files(names: Iterable[str]) -> list[str]:
    """Configuration, tokenizer and templates beside the weights; none of other formats' subfolders."""
    return [name for name in names if name.endswith(_SUPPORTING) and ("/" not in name or _MODULE_FILE.fullmatch(name))]


def is_inside(name: str) -> bool:
    """Whether a file's name, which the hub sent, stays inside the repository's folder."""
    return not name.startswith("/") and ".." not in name.split("/") and "\\" not in name and "\0" not in name


def group_ggufs(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The GGUF models among the files: the file to open, and all its parts."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if not name.endswith(".gguf") or any(word in name.lower() for word in _NO_MODEL):
            continue
        split = SPLIT_GGUF.fullmatch(name)
        if split is None:
            found[name] = (name,)
        elif int(split[2]) == 1:
            found[name] = tuple(f"{split[1]}-{i:05d}-of-{split[3]}.gguf" for i in range(1, int(split[3]) + 1))
    return found


def has_tag(file: str, tag: str) -> bool:
    """Whether a GGUF file's name says that it has this quantization."""
    stem = file.removesuffix(".gguf")
    return re.search(rf"(?i)(?:^|[-._/]){re.escape(tag)}(?:$|[-._/])", stem) is not None


def _choose_gguf(files: list[str], wanted: HubName) -> str | None:
    if wanted.file is not None:
        return wanted.file if wanted.file in files else None
    if len(files) == 1 and wanted.tag is None:
        return files[0]
    tagged = [file for file in files if has_tag(file, wanted.tag or USUAL_TAG)]
    return tagged[0] if len(tagged) == 1 else None


def _choose_safetensors(names: list[str]) -> tuple[str, ...]:
    """The shards of the model and of sentence-transformers modules. Of a repository with other names all at its top,
    but no copies in the original authors' layout (``consolidated``) beside others."""
    files = [name for name in names if name.endswith(".safetensors")]
    top = [name for name in files if "/" not in name]
    shards = ["model.safetensors"] if "model.safetensors" in top else [name for name in top if _SHARD.fullmatch(name)]
    chosen = shards or [name for name in top if not name.startswith("consolidated")] or top
    return tuple(chosen + [name for name in files if chosen and _MODULE_FILE.fullmatch(name)])


def _no_weights(names: list[str], repository: str) -> str:
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return (
            f"{repository} on the Hugging Face hub has only pickles ({pickles[0]}), which can run code when they are "
            "read and are never loaded; look for a copy with safetensors or GGUF files, or convert it"
        )
    return f"{repository} on the Hugging Face hub has neither safetensors nor GGUF files"
