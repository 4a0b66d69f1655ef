"""A media worker process: ``python -m headrace.service.media.worker``, started by `MediaWorkers` with a socket as its
standard input. It decodes one item after the other, so that a hostile file can crash, fill or hang nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys

import msgspec

from headrace.base import env
from headrace.base.errors import HeadraceError, MediaError
from headrace.base.messages import ErrorInfo
from headrace.base.registry import load_target
from headrace.base.spawn import continue_when_orphaned
from headrace.service.framing import LENGTH, frame, read_all
from headrace.service.media.wire import (
    Failed,
    Job,
    Preparing,
    Setup,
    ToWorker,
    decode_to_worker,
    pack_item,
)
from headrace.service.transport import engine_line

logger = logging.getLogger(__name__)

MEMORY_BYTES = 8 << 30
"""Private memory that the process may take: more is a file that was made to fill it."""
NICE = 5


def main() -> None:
    """Prepare items until the parent closes its end."""
    logging.basicConfig(level=env.log_level().upper(), format="%(asctime)s %(levelname)s media: %(message)s")
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the parent decides
        signal.signal(ignored, signal.SIG_IGN)
    continue_when_orphaned()
    with contextlib.suppress(OSError, ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)  # decoding must not take the cores that steps and streams need
    line = engine_line()
    preparer: Preparing | None = None
    failure: ErrorInfo | None = None
    while (message := _receive(line)) is not None:
        if isinstance(message, Setup):
            try:
                preparer = load_target(message.preparer)(message)
            except Exception as error:
                logger.exception("the model's processor cannot be loaded")
                failure = ErrorInfo.of(error)
        elif preparer is not None:
            for part in _prepare(preparer, message):
                line.sendall(part)
        elif failure is not None:  # told to each request: the server serves texts all the same
            line.sendall(frame(Failed(failure)))


def _receive(line: socket.socket) -> ToWorker | None:
    """The next message; None when the parent has closed its end."""
    try:
        (length,) = LENGTH.unpack(*read_all(line, [LENGTH.size]))
        message: ToWorker = decode_to_worker(*read_all(line, [length]))
        if isinstance(message, Job):
            (data,) = read_all(line, [message.size])
            return msgspec.structs.replace(message, data=bytes(data), size=0)
        return message
    except ConnectionResetError:
        return None


def _prepare(preparer: Preparing, job: Job) -> list[bytes]:
    """What is sent."""
    try:
        return pack_item(preparer.prepare(job.decoded()))
    except HeadraceError as error:
        return [frame(Failed(ErrorInfo.of(error)))]
    except MemoryError:
        text = f"{job.param} needs too much memory to be read"
    except Exception:
        logger.exception("%s cannot be prepared", job.param)
        text = f"{job.param} cannot be prepared for this model"
    return [frame(Failed(ErrorInfo.of(MediaError(text, param=job.param))))]


if __name__ == "__main__":
    main()
    sys.exit(0)
