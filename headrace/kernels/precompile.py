"""Compile Triton kernels in parallel before the first launch, on a machine whose compilation cache lacks them.

`precompile` finds the kernels by a dry run, in which launches are skipped. Does nothing without a GPU and Triton.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from headrace.kernels.compile_workers import CompileWorkers, SourceJob, describe_job, find_workers
from headrace.kernels.cuda_source import compile_source, compiled_by

logger = logging.getLogger(__name__)

MAX_THREADS = 8
"""Where there are no processes: a third of a compilation holds the GIL, sixteen threads were no faster than eight."""

# functions whose result has arbitrary contents, see `_Zeros`
UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)


class _Zeros(TorchFunctionMode):
    """Makes new uninitialised tensors zero, since skipped launches do not fill them: torch operations that follow then
    see a valid index and a finite number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNFILLED else made


class _Unlaunched:
    """Stands in for a kernel that is being compiled: a launch does nothing. If compilation failed, it raises that
    error at every launch."""

    function = packed_metadata = None

    def __init__(self, error: BaseException | None = None):
        self._error = error

    def launch_metadata(self, *_: Any) -> None:
        if self._error is not None:
            raise self._error

    def run(self, *_: Any) -> None:
        return None


def _dry_run(pool: Executor, workers: CompileWorkers | None) -> Any:
    """A context in which launches of kernels that this process has not compiled are skipped, and the kernels are
    compiled on ``pool``, or by the ``workers`` that its threads wait for. Its end waits for all of them and installs
    them."""
    from triton import AsyncCompileMode, knobs

    class DryRun(AsyncCompileMode):
        def __init__(self) -> None:
            super().__init__(pool)
            self.compiling: dict[str, Future[Any]] = {}
            self._callers: list[tuple[str, Callable[[Any], None]]] = []

        def submit(
            self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], *_: Any
        ) -> _Unlaunched:
            """``finalize_fn`` sets what is launched from now on. Triton 3.9 passes a further argument, to undo that."""

            job = None if workers is None else describe_job(compile_fn, str(knobs.cache.dir))

            def compile_and_load() -> Any:
                if workers is not None and job is not None:
                    workers.compile(job)
                kernel = compile_fn()  # finds in the cache what a worker has compiled
                assert kernel.run is not None, "reading it builds the C launcher and loads the code"
                return kernel

            # one compilation for equal kernels, but every caller's cache entry must be replaced at the end
            if key not in self.compiling:
                self.compiling[key] = pool.submit(compile_and_load)
            self._callers.append((key, finalize_fn))
            stand_in = _Unlaunched()
            finalize_fn(stand_in)
            return stand_in

        def submit_source(self, name: str, options: tuple[str, ...]) -> None:
            """Own CUDA C++; see `compiled_by`. What is not in the cache afterwards is compiled where it is used."""

            def compile_into_cache() -> None:
                job = msgspec.json.encode(SourceJob(name, options))
                if workers is None or not workers.compile(job):
                    compile_source(name, options)

            key = f"{name} {options}"
            if key not in self.compiling:
                self.compiling[key] = pool.submit(compile_into_cache)

        def __exit__(self, *about: Any) -> None:
            for key, finalize in self._callers:
                error = self.compiling[key].exception()
                finalize(self.compiling[key].result() if error is None else _Unlaunched(error))
            super().__exit__(*about)

    return DryRun()


def start_triton(device: torch.device) -> None:
    """Compute Triton's version key on a thread, before the first kernel needs it: Triton hashes its own sources, which
    takes 0.3 s. Where nothing was ever compiled, start the processes that will. Does nothing unless ``device`` is a
    GPU."""
    if not _has_compiler(device):
        return
    from triton.runtime import cache as triton_cache

    if hasattr(triton_cache, "triton_key"):  # memoised
        Thread(target=triton_cache.triton_key, name="triton-key", daemon=True).start()
    workers = find_workers()
    if workers is not None and not _marker_folder().exists():
        workers.start()


def precompile(run: Callable[[], None], about: str, device: torch.device) -> int:
    """Call ``run``, which does what later steps will do (on meaningless numbers), and compile the kernels that it would
    launch. Returns their number. Failures are logged: if ``run`` fails, kernels that it did not reach are compiled at
    their first launch; a kernel that does not compile raises its error when it is launched. A marker in Triton's cache
    makes later calls for the same ``about`` (the model and its sizes) no-ops, without calling ``run``."""
    if not _has_compiler(device):
        return 0
    marker = _marker_of(about, device)
    if marker.exists():
        return 0
    began = time.perf_counter()
    workers = find_workers()
    if workers is not None and not workers.start():
        workers = None
    threads = workers.count if workers is not None else max(1, min(MAX_THREADS, torch.get_num_threads()))
    with ThreadPoolExecutor(threads, "kernels", initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        with _dry_run(pool, workers) as found:
            try:
                with _Zeros(), compiled_by(found.submit_source):
                    run()
            except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as error:
                logger.warning("kernels are compiled at their first launch: %s: %s", type(error).__name__, error)
            ran = time.perf_counter()
        wanted = found.compiling.values()
    for failed in filter(None, [future.exception() for future in wanted]):
        logger.warning("a kernel could not be precompiled: %s: %s", type(failed).__name__, failed)
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        logger.warning("every start looks for kernels again, as Triton's cache cannot be written: %s", error)
    took = time.perf_counter() - began
    logger.info("%d kernels found in %.1f s and compiled in %.1f s", len(wanted), ran - began, took)
    return len(wanted)


def _has_compiler(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


def _marker_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir) / "headrace"


def _marker_of(about: str, device: torch.device) -> Path:
    """A file in Triton's cache folder, so that it disappears with the compiled kernels."""
    import triton

    facts = (triton.__version__, torch.__version__, str(torch.cuda.get_device_capability(device)), about)
    digest = hashlib.sha256("\n".join(facts).encode())
    # any change of a kernel's source makes a new marker
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return _marker_folder() / digest.hexdigest()[:32]
