"""`Preparer`: one image, video or clip to the arrays that a model's encoder takes, by the model's own processor of
transformers, and to the tokens that stand for it. Leads to torch. No code of a checkpoint is run.

Refuses: prompts; an item is prepared alone, whatever stands beside it.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import MediaError, ModelError
from headrace.base.media import (
    ARRAYS,
    DTYPES,
    LEVELS,
    MediaArray,
    MediaItem,
    MediaKind,
    MediaPlace,
    digest_of,
    find_runs,
)
from headrace.base.media_facts import MediaFacts, WindowFrames
from headrace.models.catalog import find_family
from headrace.models.source import ModelSource, resolve_source
from headrace.service.media.audio import LOUDEST, check_clip, is_audible, open_audio, resample
from headrace.service.media.images import as_seen, import_pillow, open_image
from headrace.service.media.pixel_bytes import RAW, PixelBytes, to_bytes
from headrace.service.media.video import Frames, open_video
from headrace.service.media.wire import Job, PreparedItem, Setup

logger = logging.getLogger(__name__)

INSTALL = "pip install 'headrace[vision]'"
TORCHVISION = "pip install 'headrace[video]'"
_PARTS = {
    "image": (("image_processor",), INSTALL), "video": (("video_processor",), TORCHVISION),
    "audio": (("feature_extractor", "audio_processor"), "pip install 'headrace[audio]'"),
}
"""The part of a processor that a kind needs, by its names, and what brings its libraries."""
LOW_DETAIL = 512
"""Pixels of the longer side of an image with ``detail`` "low"."""
VIDEO_FPS, VIDEO_FRAMES = 2.0, 64
GRIDS = ("image_grid_thw", "video_grid_thw", "image_sizes")
OTHER_OUTPUTS = (
    "second_per_grid_ts", "video_metadata", "feature_attention_mask", "batch_num_images", "num_patches"
)
TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_CONFIG_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class Preparer:
    """Prepares for one model; used by one thread at a time."""

    def __init__(self, setup: Setup):
        source = resolve_source(setup.model)
        media = find_family(source.architecture).media
        facts = media.facts(source.config) if media is not None else None
        if media is None or facts is None:
            raise ModelError(f"{source.architecture} takes text alone")
        self._facts: MediaFacts = facts
        self._bounds = setup.media
        self._rename = media.outputs
        self._processor: Any = ImagesAlone(source, facts) if facts.is_alone else load_processor(source)
        self._tokenizer = self._processor.tokenizer
        self._settings = _describe(self._processor)
        self._bytes = None if vars(self._processor).get("image_processor") is None else PixelBytes.find(
            self._processor.image_processor
        )

    def prepare(self, job: Job) -> PreparedItem:
        """The item of a job; raises `MediaError`."""
        self._require_part(job.kind, job.param)
        settings = json.dumps(job.options, sort_keys=True) + self._settings
        digest = digest_of(job.kind, settings, [job.sha256])
        value = self._open(job)
        frames = self._facts.frames
        if job.kind == "audio" and isinstance(frames, WindowFrames):
            return self._listen(value, frames, digest, job.param, is_whole="windows" in job.options)
        return self._process(job.kind, value, digest, job.param)

    def prepare_value(self, kind: MediaKind, value: Any, param: str) -> PreparedItem:
        """The item of an image (PIL, or an array of shape [height, width] or [height, width, 3 or 4]), of frames (a
        list of images, or an array of shape [frames, height, width, 3]), or of samples (an array at the model's rate,
        or a pair of samples and rate). Raises `MediaError`."""
        self._require_part(kind, param)
        if kind == "image":
            image = self._as_image(value, param)
            return self._process(kind, image, self._digest(kind, [image]), param)
        if kind == "video":
            is_array = isinstance(value, np.ndarray) and value.ndim == 4
            if not (is_array or isinstance(value, list | tuple)) or not len(value):
                raise MediaError(
                    f"{param} must be images in a list, or an array of shape [frames, height, width, 3], one at least; "
                    f"got {type(value).__name__}", param=param
                )
            images = [self._as_image(each, f"{param}[{i}]") for i, each in enumerate(value)]
            times = [i / VIDEO_FPS for i in range(len(images))]
            return self._process(kind, Frames(images, times), self._digest(kind, images), param)
        samples = self._as_samples(value, param)
        digest = digest_of(kind, self._settings, [samples.tobytes()])
        if isinstance(self._facts.frames, WindowFrames):
            return self._listen(samples, self._facts.frames, digest, param)
        return self._process(kind, samples, digest, param)

    def _require_part(self, kind: MediaKind, param: str) -> None:
        names, install = _PARTS[kind]
        if all(vars(self._processor).get(name) is None for name in names):
            raise MediaError(
                f"{param}: libraries that prepare {kind} for this model are not installed here: {install}", param=param
            )

    def _digest(self, kind: str, images: Iterable[Any]) -> bytes:
        parts = [part for image in images for part in (repr(image.size).encode(), image.tobytes())]
        return digest_of(kind, self._settings, parts)

    def _open(self, job: Job) -> Any:
        bounds = self._bounds
        if job.kind == "image":
            image = open_image(job.data, job.param, bounds.max_pixels)
            if job.options.get("detail") == "low":
                image.thumbnail((LOW_DETAIL, LOW_DETAIL))
            return image
        if job.kind == "video":
            return open_video(
                job.data, job.param, fps=VIDEO_FPS, max_frames=VIDEO_FRAMES, max_pixels=bounds.max_pixels
            )
        return open_audio(job.data, job.param, self._rate())

    @property
    def _extractor(self) -> Any:
        parts = vars(self._processor)
        return next(parts[name] for name in _PARTS["audio"][0] if parts.get(name) is not None)

    def _rate(self) -> int:
        return int(self._extractor.sampling_rate)

    def _as_image(self, value: Any, param: str) -> Any:
        pillow = import_pillow()
        if isinstance(value, np.ndarray):
            is_colour = value.ndim == 3 and value.shape[2] in (3, 4)
            if value.dtype != np.uint8 or not (is_colour or value.ndim == 2):
                raise MediaError(
                    f"{param} must be an array of uint8 and shape [height, width] or [height, width, 3 or 4]; got "
                    f"{value.dtype} and {list(value.shape)}", param=param
                )
            value = pillow.fromarray(value)
        if not isinstance(value, pillow.Image):
            raise MediaError(
                f"{param} must be a PIL image, an array, a path, an address or bytes, got {type(value).__name__}",
                param=param
            )
        return as_seen(value, param, self._bounds.max_pixels)

    def _as_samples(self, value: Any, param: str) -> Any:
        samples, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, self._rate())
        try:
            samples, rate = np.asarray(samples, dtype=np.float32), int(rate)
        except (TypeError, ValueError, OverflowError) as error:
            raise MediaError(
                f"{param} must be an array of samples, or a pair of samples and rate: {str(error)[:120]}", param=param
            ) from None
        if samples.ndim != 1 or not samples.size or not is_audible(samples):
            raise MediaError(
                f"{param} must be an array of finite samples up to {LOUDEST:g}, of shape [samples]; got shape "
                f"{list(samples.shape)}",
                param=param
            )
        check_clip(param, rate=rate, channels=1, frames=len(samples))
        return resample(samples, rate, self._rate())

    def _process(self, kind: MediaKind, value: Any, digest: bytes, param: str) -> PreparedItem:
        mark = self._facts.texts[kind]
        options: dict[str, Any] = {"text": [mark], "text_kwargs": {"add_special_tokens": False}}
        if kind == "image":
            options["images"] = [value]
        elif kind == "video":
            about = [value.describe(VIDEO_FPS)]
            options |= {
                "videos": [value.images], "videos_kwargs": {"do_sample_frames": False, "video_metadata": about}
            }
        else:
            self._check_length(value, param)
            options |= {"audio": [value], "audio_kwargs": {"sampling_rate": self._rate()}}
        try:
            made = self._rename(self._run(kind, options))
        except (ValueError, TypeError, ArithmeticError, IndexError) as error:  # sizes that the processor refuses
            raise MediaError(f"{param} cannot be prepared for this model: {str(error)[:200]}", param=param) from error
        token_ids = [int(token_id) for token_id in made["input_ids"][0]]
        return self._item(kind, made, token_ids, digest, param)

    def _run(self, kind: MediaKind, options: dict[str, Any]) -> dict[str, Any]:
        """What the processor makes, pixels of images as bytes if they can be."""
        if kind == "image" and self._bytes is not None:
            made = dict(self._processor(**options, images_kwargs=RAW))
            found = to_bytes(_plain(made[ARRAYS[kind]]))
            if found is not None:
                return {**made, ARRAYS[kind]: found, LEVELS: self._bytes.levels}
        return dict(self._processor(**options))

    def _check_length(self, samples: Any, param: str) -> None:
        """Raise `MediaError` for a clip that the model's processor would cut off."""
        frames, rate = self._facts.frames, self._rate()
        most = len(samples) if frames is None else frames.frames * self._hop
        if len(samples) > most:
            raise MediaError(
                f"{param} lasts {len(samples) / rate:.1f} seconds; this model hears {most / rate:g} at a time: "
                "split it", param=param
            )

    @property
    def _hop(self) -> int:
        """Samples of a frame."""
        return int(self._extractor.hop_length)

    def _listen(
        self, samples: Any, window: WindowFrames, digest: bytes, param: str, *, is_whole: bool = False
    ) -> PreparedItem:
        """Frames [frames, mels] of a window. ``is_whole``: of a clip of any length, with a window of silence behind it,
        so that there is one from any frame of the clip on. ``grid`` says how many are the clip's."""
        if not is_whole:
            self._check_length(samples, param)
        length = window.frames * self._hop
        padded = np.pad(samples, (0, length if is_whole else length - len(samples)))
        made = self._extractor(
            padded, sampling_rate=self._rate(), padding="do_not_pad", truncation=False, return_tensors="np"
        )
        found = np.ascontiguousarray(made["input_features"][0].T, dtype=np.float32)
        place = MediaPlace("audio", digest, [(0, window.num_tokens)], (-(-len(samples) // self._hop),))
        token_ids = [self._facts.token_ids["audio"]] * window.num_tokens
        return PreparedItem(MediaItem(place, {"input_features": MediaArray.of(found)}), token_ids)

    def _item(
        self, kind: MediaKind, made: dict[str, Any], token_ids: list[int], digest: bytes, param: str
    ) -> PreparedItem:
        token_id = self._facts.token_ids[kind]
        (runs,) = find_runs(token_ids, token_id, [token_ids.count(token_id)])
        grid = next((made[name] for name in GRIDS if name in made), None)
        if "feature_attention_mask" in made:  # frames of the clip; what follows is silence
            grid = np.asarray(made["feature_attention_mask"]).sum(-1, keepdims=True)
        numbers = {}
        if kind == "video" and "second_per_grid_ts" in made:
            numbers["second_per_grid_ts"] = float(np.asarray(made["second_per_grid_ts"]).reshape(-1)[0])
        place = MediaPlace(
            kind, digest, runs, tuple(int(size) for size in np.asarray(grid)[0]) if grid is not None else (), numbers
        )
        arrays = {
            name: MediaArray.of(_plain(values)) for name, values in made.items()
            if name not in (*GRIDS, *TEXT_OUTPUTS, *OTHER_OUTPUTS)
        }
        if not runs:
            raise MediaError(f"{param} stands for no tokens in this model", param=param)
        return PreparedItem(MediaItem(place, arrays), token_ids, self._spell(token_ids))

    def _spell(self, token_ids: list[int]) -> str | None:
        """The text of these tokens; None where there is none."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text if self._tokenizer.encode(text, add_special_tokens=False) == token_ids else None


class ImagesAlone:
    """In place of a processor, for models of which an image is a prompt of its own: the image processor alone, as texts
    go another way."""

    tokenizer = None

    def __init__(self, source: ModelSource, facts: MediaFacts):
        self.image_processor = _load_part(_import_transformers(), "image_processor", source.folder)
        self._token_id = facts.token_ids["image"]

    def __call__(
        self, *, images: list[Any], images_kwargs: Mapping[str, Any] | None = None, **of_texts: Any
    ) -> dict[str, Any]:
        return {**self.image_processor(images=images, **(images_kwargs or {})), "input_ids": [[self._token_id]]}

    def to_json_string(self) -> str:
        """Settings, as processors give them."""
        text: str = self.image_processor.to_json_string()
        return text


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"media need transformers, which is not installed here: {INSTALL}") from error
    return transformers


def load_processor(source: ModelSource) -> Any:
    """The processor of a model, with image processors on Pillow. Parts whose libraries are missing are left out: the
    first item that needs one fails. Raises `ModelError`."""
    transformers, folder = _import_transformers(), source.folder
    stated = {name: _read_json(folder / name) for name in _CONFIG_FILES}
    kind = _processor_class(transformers, stated.values(), source.config)

    class Partial(kind):  # type: ignore[misc, valid-type]
        """The processor, which may lack parts."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    parts = {name: _load_part(transformers, name, folder) for name in kind.get_attributes()}
    known = inspect.signature(kind.__init__).parameters
    options = {
        name: value for name, value in stated["processor_config.json"].items() if name in known and name not in parts
    }
    return Partial(**parts, **options)


def _processor_class(transformers: Any, stated: Iterable[dict[str, Any]], config: dict[str, Any]) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names = [each.get("processor_class") for each in stated]
    names.append(PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type"))))
    for name in filter(None, names):
        found = getattr(transformers, str(name), None)  # names are imported when they are asked for
        if isinstance(found, type) and issubclass(found, transformers.ProcessorMixin):
            return found
        if found is not None:  # stands for a class whose libraries are missing
            raise ModelError(f"{name} of transformers needs torchvision, which is not installed here: {TORCHVISION}")
    raise ModelError(
        f"no processor of media for models of type {config.get('model_type')!r} in transformers; is "
        "preprocessor_config.json there?"
    )


def _load_part(transformers: Any, name: str, folder: Path) -> Any:
    loaders = {
        "image_processor": (transformers.AutoImageProcessor, {"backend": "pil"}),
        "video_processor": (transformers.AutoVideoProcessor, {}),
        "feature_extractor": (transformers.AutoFeatureExtractor, {}),
        "audio_processor": (transformers.AutoFeatureExtractor, {}),
        "tokenizer": (transformers.AutoTokenizer, {}),
    }
    loader, options = loaders[name]
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except (ImportError, OSError, ValueError) as error:
        if name in ("tokenizer", "image_processor"):
            raise ModelError(f"the {name} of {folder} cannot be loaded: {error}") from error
        logger.info("no %s: %s", name, str(error).strip().splitlines()[0])
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return found if isinstance(found, dict) else {}


def _describe(processor: Any) -> str:
    """All that changes what a processor makes, but the content."""
    import transformers

    return f"{transformers.__version__} {processor.to_json_string()}"


def _plain(values: Any) -> np.ndarray:
    """An array in a dtype that crosses processes."""
    if isinstance(values, list) and len(values) == 1:
        values = values[0][None] if isinstance(values[0], np.ndarray) else values
    array = np.asarray(values)
    if array.ndim == 5 and len(array) == 1:  # the tiles of the only image, in a list of images
        array = array[0]
    if array.dtype.name in DTYPES:
        return array
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
