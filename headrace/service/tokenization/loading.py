"""Finds a model's tokenizer and loads it: ``tokenizer.json`` folders, GGUF metadata, SentencePiece models.

Refuses: guessing. A form that would have to be converted by rules outside its file is an error that names the fix.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headrace.base.config import ModelConfig
from headrace.base.errors import ConfigError, HeadraceError, ModelError, PluginError, UnknownArchitecture
from headrace.base.registry import load_target
from headrace.models.catalog import find_family
from headrace.models.source import ModelSource, resolve_source
from headrace.models.weights.files import require_content
from headrace.models.weights.gguf_file import read_gguf_metadata
from headrace.service.tokenization.gguf_vocabulary import adds_bos, build_gguf
from headrace.service.tokenization.sentencepiece import build_sentencepiece, read_sentencepiece
from headrace.service.tokenization.tokenizer import Tokenizer, TokenizerFacts

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 256 << 20
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# "seperator" is how the GGUF specification spells that key.
_GGUF_IDS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator",
    "cls_token": "cls", "mask_token": "mask"
}
_GGUF_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_PIECE_FILES = ("tokenizer.model", "spiece.model")
_UNREADABLE_FILES = ("tekken.json", "vocab.json", "vocab.txt", "sentencepiece.bpe.model")
"""Vocabularies whose ids depend on conversion rules outside the file. In fairseq's ``sentencepiece.bpe.model`` (XLM-R)
they are shifted by one."""


def open_tokenizer(
    config: ModelConfig, *, chat_template: str | None = None, is_optional: bool = False
) -> Tokenizer | None:
    """The model's tokenizer; None when the configuration says to go without, or when it has none and ``is_optional``
    (token ids can then still be served)."""
    if config.skip_tokenizer:
        return None
    try:
        return load_tokenizer(resolve_source(config), tokenizer=config.tokenizer, chat_template=chat_template)
    except HeadraceError as error:
        if not is_optional or config.tokenizer is not None:
            raise
        logger.warning("no tokenizer, token ids only: %s", error)
        return None


def load_tokenizer(source: ModelSource, *, tokenizer: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a resolved model. ``tokenizer`` names another source: a folder, a file, or a model.
    ``chat_template`` is a Jinja file, or a template's text, that replaces the model's own.

    Raises `ModelError` when there is none that can be read, saying which files would do.
    """
    backend, facts = _load_override(tokenizer) if tokenizer else _load_source(source)
    # All sources count: a model may list some of its end tokens in one file only. Ids beyond the vocabulary are errors
    # of the checkpoint and are dropped.
    ends = (
        *facts.eos_ids, *_ids_in(source.generation_config.get("eos_token_id")),
        *_ids_in(source.config.get("eos_token_id"))
    )
    size = backend.get_vocab_size(with_added_tokens=True)
    facts = replace(facts, eos_ids=tuple(i for i in dict.fromkeys(ends) if 0 <= i < size))
    if chat_template is not None:
        facts = replace(facts, chat_templates={"default": _read_template(chat_template)})
    return Tokenizer(backend, facts, None if facts.chat_templates else _find_encoder(source))


def _find_encoder(source: ModelSource) -> Any:
    """The renderer of a family whose chat format is code instead of a template; None for all others. A family that
    cannot be loaded counts as having none: the engine reports that error."""
    if not source.config.get("architectures"):
        return None
    try:
        family = find_family(source.architecture)
    except (PluginError, UnknownArchitecture):
        return None
    return load_target(family.chat_encoder)(source.folder) if family.chat_encoder else None


def _load_source(source: ModelSource) -> tuple[Backend, TokenizerFacts]:
    if source.kind == "gguf":
        metadata = source.gguf_metadata
        return _load_gguf(metadata if "tokenizer.ggml.tokens" in metadata else read_gguf_metadata(source.path))
    return _load_path(source.path)


def _load_override(name: str) -> tuple[Backend, TokenizerFacts]:
    path = Path(os.path.expanduser(name))
    try:
        return _load_path(path) if path.exists() else _load_source(resolve_source(ModelConfig(model=name)))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or name}: {error.strerror or error}") from error


def _load_path(path: Path) -> tuple[Backend, TokenizerFacts]:
    if path.is_dir():
        return _load_folder(path)
    if path.suffix == ".gguf":
        return _load_gguf(read_gguf_metadata(path))
    if path.suffix == ".json":
        return _load_json(path, path.parent)
    return _load_pieces(path, path.parent)


def _load_folder(folder: Path) -> tuple[Backend, TokenizerFacts]:
    if (folder / "tokenizer.json").is_file():
        return _load_json(folder / "tokenizer.json", folder)
    for name in _PIECE_FILES:
        if (folder / name).is_file():
            return _load_pieces(folder / name, folder)
    other = sorted(p.name for p in folder.iterdir() if p.name in _UNREADABLE_FILES or p.suffix == ".tiktoken")
    found = (
        f"; {', '.join(other)} must be converted first: load it once with transformers and call save_pretrained"
        if other else ""
    )
    raise ModelError(
        f"{folder} holds no tokenizer.json and no SentencePiece model ({', '.join(_PIECE_FILES)}){found}. "
        "Name another folder with --tokenizer, or serve token ids only with --skip-tokenizer"
    )


def _build(what: str, build: Callable[[], Backend]) -> Backend:
    try:
        return build()
    except HeadraceError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for everything
        raise ModelError(f"{what} cannot be read as a tokenizer: {error}") from error


def _load_json(path: Path, folder: Path) -> tuple[Backend, TokenizerFacts]:
    require_content(path)
    backend = _build(str(path), lambda: Backend.from_file(str(path)))
    config = _read_config(folder)
    _add_declared(backend, config)
    names = _names(config)
    _mark_special(backend, names.values())
    facts = TokenizerFacts(
        names=names, add_bos=_flag(config, "add_bos_token"), add_eos=_flag(config, "add_eos_token"),
        chat_templates=_templates(folder, config),
    )
    return backend, facts


def _load_pieces(path: Path, folder: Path) -> tuple[Backend, TokenizerFacts]:
    require_content(path)
    model = read_sentencepiece(path)
    backend = _build(str(path), lambda: build_sentencepiece(model.vocabulary))
    config = _read_config(folder)
    _add_declared(backend, config)
    pieces = model.vocabulary.pieces
    declared = {"bos_token": model.bos_id, "eos_token": model.eos_id, "pad_token": model.pad_id}
    names = {name: pieces[i] for name, i in declared.items() if 0 <= i < len(pieces)} | _names(config)
    _mark_special(backend, names.values())
    add_bos = _flag(config, "add_bos_token")
    facts = TokenizerFacts(
        names=names, add_bos=model.bos_id >= 0 if add_bos is None else add_bos, add_eos=_flag(config, "add_eos_token"),
        chat_templates=_templates(folder, config),
    )
    return backend, facts


def _load_gguf(metadata: dict[str, Any]) -> tuple[Backend, TokenizerFacts]:
    backend = _build("the GGUF file's metadata", lambda: build_gguf(metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_IDS.items()}
    names = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    templates = {"default": metadata["tokenizer.chat_template"]} if metadata.get("tokenizer.chat_template") else {}
    for name in metadata.get("tokenizer.chat_templates", ()):
        templates[str(name)] = metadata.get(f"tokenizer.chat_template.{name}", "")
    facts = TokenizerFacts(
        names=names, add_bos=adds_bos(metadata), add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        eos_ids=tuple(int(metadata[key]) for key in _GGUF_ENDS if metadata.get(key) is not None),
        chat_templates={name: text for name, text in templates.items() if text},
    )
    return backend, facts


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json for keys that it lacks."""
    return _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return {key: value for key, value in loaded.items() if value is not None}


def _text_of(token: Any) -> str | None:
    """A special token is written as a string or as an object with its ``content``."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _names(config: dict[str, Any]) -> dict[str, str]:
    found = {name: _text_of(config.get(name)) for name in _NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _flag(config: dict[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None


def _declared(config: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for key in sorted(declared, key=int):
            if _text_of(declared[key]) is not None:
                yield int(key), declared[key]


def _add_declared(backend: Backend, config: dict[str, Any]) -> None:
    """Add the tokens of ``added_tokens_decoder`` in tokenizer_config.json that are not added tokens yet. A new token
    gets the next free id, so it is added only if that is its declared id; one known by another id is skipped."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in _declared(config):
        content = token["content"]
        at = backend.token_to_id(content)
        if content in known or (at is not None and at != token_id):
            continue
        if at is None and token_id != backend.get_vocab_size(with_added_tokens=True):
            continue
        flags = {
            flag: bool(token.get(flag, False)) for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        backend.add_tokens([AddedToken(content, **flags)])


def _mark_special(backend: Backend, texts: Iterable[str]) -> None:
    """Named tokens (bos, eos …) are special even where the vocabulary does not say so."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [t for t in dict.fromkeys(texts) if t not in special and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in missing])


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over tokenizer_config.json."""
    found: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        found["default"] = declared
    elif isinstance(declared, list):
        found.update(
            {
                str(t["name"]): str(t["template"])
                for t in declared if isinstance(t, dict) and "name" in t and "template" in t
            }
        )
    if (folder / "chat_template.json").is_file():
        text = _read_json(folder / "chat_template.json").get("chat_template")
        found |= {"default": text} if isinstance(text, str) else {}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _read_template(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    try:
        return Path(os.path.expanduser(chat_template)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: cannot read {chat_template!r}: {error}", param="chat_template") from error


def _ids_in(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(i for i in value if isinstance(i, int)) if isinstance(value, list | tuple) else ()
