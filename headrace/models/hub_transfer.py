"""Fetches one file of a Hugging Face repository into the cache, in the layout of huggingface_hub, and goes on where an
earlier process was interrupted.

The library itself keeps whole files alone: what it has of one when its process ends is lost. Layout:
``blobs/ETAG`` holds the bytes, ``snapshots/COMMIT/NAME`` links to it; ``.headrace/`` has what is not complete yet.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from headrace.base.errors import ModelError
from headrace.models.packages import locked

_ETAG = re.compile(r"[\w-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def transfer(repository: str, name: str, commit: str, cache: Path, timeout_s: float) -> None:
    """Fetch the file ``name`` into ``cache``, the folder of the repository. Raises what huggingface_hub raises, and
    `ModelError` for a file that arrived damaged or cannot be fetched this way."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository, name, revision=commit)
    found = get_hf_file_metadata(url, timeout=timeout_s)
    etag = found.etag or ""
    if not _ETAG.fullmatch(etag):
        raise ModelError(f"the hub gives {repository}/{name} no usable ETag: {etag!r}")
    if (found.size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise ModelError(f"{name} is too large for a plain download; fetch it with: hf download {repository} {name}")
    blob, own = cache / "blobs" / etag, cache / ".headrace"
    for folder in (blob.parent, own):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(own / f"{etag}.lock"):  # several processes may serve the same model
        if not blob.is_file():
            partial = own / f"{etag}.partial"
            with partial.open("ab") as file:
                http_get(
                    url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=found.size,
                    displayed_filename=name
                )
            _verify(partial, etag, f"{repository}/{name}")
            partial.replace(blob)
    _link(cache / "snapshots" / commit / name, blob)


def _verify(path: Path, etag: str, name: str) -> None:
    """Large files have their SHA-256 for an ETag; others that of git, which is not checked."""
    if not _SHA256.fullmatch(etag):
        return
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != etag:
            path.unlink()
            raise ModelError(f"{name} arrived damaged and was removed; run the command again")


def _link(path: Path, blob: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # a file system without links
        os.replace(blob, path)
