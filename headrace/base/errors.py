"""The error tree. Every error a user can cause or see is one of these; each carries its HTTP status.

Refuses: formatting for a particular protocol (``serving/`` does that).
"""

from __future__ import annotations

from typing import Self


class HeadraceError(Exception):
    """Root of the tree. ``status`` is the HTTP status, ``kind`` a stable machine-readable name."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def with_message(self, message: str, *, param: str | None = None) -> Self:
        """The same error with another message, and with ``param`` unless that is None."""
        return type(self)(message, param=param or self.param, retry_after=self.retry_after)


class ConfigError(HeadraceError, ValueError):
    """A configuration value is wrong; the message names the field and the values it takes."""

    kind = "config_error"


class ModelError(HeadraceError):
    """A model cannot be found, read or built."""

    kind = "model_error"


class UnknownArchitecture(ModelError):
    """No family serves the architecture; the message lists the nearest known ones."""


class WeightError(ModelError):
    """A checkpoint misses a tensor, has one too many, or one of the wrong shape."""


class PluginError(HeadraceError, RuntimeError):
    """A plug-in (family, kernel, backend) failed to load; ``__cause__`` is the original error."""

    kind = "plugin_error"


class RequestError(HeadraceError, ValueError):
    """The request is wrong; it fails alone. ``param`` names the offending field."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(RequestError):
    """Prompt (plus requested output) does not fit ``max_model_len``. Clients that shorten the prompt and retry
    recognise it by its code, or by the first words of `of`."""

    kind = "context_length_exceeded"

    @classmethod
    def of(cls, max_len: int, reason: str, *, param: str | None = None) -> ContextLengthExceeded:
        """``max_len``: tokens that the context takes; ``reason``: what needs more."""
        return cls(f"this model's maximum context length is {max_len} tokens (max_model_len); {reason}", param=param)


class UnsupportedFeature(RequestError):
    """A known field this server does not implement; refused, never ignored."""

    kind = "unsupported_feature"


class MediaError(RequestError):
    """An image, video or audio clip of a request cannot be fetched, read or prepared; ``param`` names its part of the
    request."""

    kind = "invalid_media"


class AdapterError(RequestError):
    """The files of a LoRA adapter are wrong, or do not fit the model."""

    def __init__(self, message: str, *, param: str | None = "lora_path", retry_after: float | None = None):
        super().__init__(message, param=param, retry_after=retry_after)


class NotFound(RequestError):
    """The named model or object does not exist."""

    status = 404
    kind = "not_found"


class Unauthorized(HeadraceError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"


class Forbidden(HeadraceError):
    """The way the server was started forbids this; no key allows it."""

    status = 403
    kind = "forbidden"


class Conflict(HeadraceError):
    """It cannot be done in the current state; the message says what prevents it."""

    status = 409
    kind = "conflict"


class QueueFull(HeadraceError):
    """``max_queued`` requests are waiting; try again after ``retry_after`` seconds."""

    status = 429
    kind = "queue_full"


class DeadlineExceeded(HeadraceError):
    """The request's deadline passed before it finished."""

    status = 504
    kind = "deadline_exceeded"


class StepFailed(HeadraceError):
    """An exception inside the step that this request was part of."""

    kind = "step_failed"


class OutOfDeviceMemory(StepFailed):
    """The device had no memory for a step; smaller steps may still fit."""


class OutOfPages(HeadraceError):
    """The request alone needs more KV pages than the device has."""

    status = 500
    kind = "out_of_kv_pages"


class EngineUnavailable(HeadraceError):
    """The engine process is starting, restarting or draining."""

    status = 503
    kind = "engine_unavailable"


class EngineBroken(EngineUnavailable):
    """The engine cannot be trusted any more and ends, to be started again: something failed on some of its ranks."""


class EngineGivenUp(EngineUnavailable):
    """The engine has crashed too often and is not started again."""


class EngineAsleep(EngineUnavailable):
    """The engine sleeps: its memory is released, and it takes no requests until it is woken."""

    kind = "engine_asleep"


class PeerFailed(HeadraceError):
    """Another rank could not do what this one did."""

    kind = "peer_failed"
    status = 503


class TransferFailed(HeadraceError):
    """Pages could not be brought to another engine; the request can be computed anew."""

    kind = "transfer_failed"
    status = 503


def error_from_kind(
    kind: str, message: str, *, param: str | None = None, retry_after: float | None = None
) -> HeadraceError:
    """Rebuild the typed error that crossed a process boundary as ``(kind, message)``. Subclasses without a ``kind`` of
    their own come back as the class that defines it; an unknown kind becomes `HeadraceError`."""
    # Parents come before their subclasses, and the first class of a kind wins.
    pending: list[type[HeadraceError]] = [HeadraceError]
    known: dict[str, type[HeadraceError]] = {}
    while pending:
        cls = pending.pop()
        known.setdefault(cls.kind, cls)
        pending.extend(cls.__subclasses__())
    return known.get(kind, HeadraceError)(message, param=param, retry_after=retry_after)
