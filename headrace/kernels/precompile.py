"""Compile kernels in parallel before the first launch, on a machine whose compilation cache lacks them.

`precompile` finds the kernels by a dry run, in which launches are skipped; `compile_ahead` by one of something alike,
and compiles them while other work goes on. Both do nothing without a GPU and Triton.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import msgspec
import torch

from headrace.base.errors import HeadraceError
from headrace.kernels.compile_workers import SourceJob, describe_job, find_workers
from headrace.kernels.cuda_source import Compiling, compile_source, compiled_by
from headrace.kernels.nvrtc import FOLDER as CUDA_FOLDER
from headrace.kernels.nvrtc import Source

logger = logging.getLogger(__name__)

MAX_THREADS = 8
"""Where there are no processes: a third of a compilation holds the GIL, sixteen threads were no faster than eight."""

UNFILLED = (
    (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
"""Where functions are whose result has arbitrary contents; see `_zeros`."""

PARSES = 8
"""Tries; see `_parse_again`."""

FAULTS = (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, LookupError, SystemError, HeadraceError)
"""What a dry run may end with: kernels that it did not reach are compiled at their first launch."""


@contextmanager
def _zeros() -> Iterator[None]:
    """Makes new uninitialised tensors zero in the body, since skipped launches do not fill them: torch operations that
    follow then see a valid index and a finite number. The functions themselves are replaced, also for other threads: a
    mode of torch's would be called wherever a shape or an address is looked at, 2 us each and hundreds of thousands of
    times."""
    with ExitStack() as undo:
        for owner, name in UNFILLED:
            own = vars(owner).get(name)
            undo.callback(*(delattr, owner, name) if own is None else (setattr, owner, name, own))
            setattr(owner, name, _fill(getattr(owner, name)))
        yield


def _fill(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs).zero_()

    return made


class _StandIn:
    """Stands in for a kernel that is being compiled. A launch does nothing in a dry run; else it waits for the kernel
    and puts it in place. If compilation failed, every launch raises that error."""

    def __init__(self, compiled: Future[Any], install: Callable[[Any], None]):
        self._compiled, self._install = compiled, install
        self._kernel: Any = None

    @property
    def has_failed(self) -> bool:
        """Waits for the end of its compilation."""
        return self._compiled.exception() is not None

    def install(self) -> None:
        """Wait for the kernel, which is launched from now on. Raises what its compilation raised."""
        if self._kernel is None:
            self._kernel = self._compiled.result()
            self._install(self._kernel)

    # what Triton does with a kernel to launch it, in this order

    def launch_metadata(self, *args: Any) -> Any:
        if _is_dry.get():
            return None
        self.install()
        return self._kernel.launch_metadata(*args)

    @property
    def function(self) -> Any:
        return None if self._kernel is None else self._kernel.function

    @property
    def packed_metadata(self) -> Any:
        return None if self._kernel is None else self._kernel.packed_metadata

    def run(self, *args: Any) -> None:
        if self._kernel is not None:
            self._kernel.run(*args)


class _Compilations:
    """What dry runs found, compiled by processes or, without them, by threads; each kernel once."""

    def __init__(self, device: torch.device):
        workers = find_workers()
        self._workers = workers if workers is not None and workers.start() else None
        _load_launchers_alone()
        threads = max(1, min(MAX_THREADS, torch.get_num_threads())) if self._workers is None else self._workers.count
        self._pool = ThreadPoolExecutor(
            threads, "kernels", initializer=torch.cuda.set_device, initargs=(device,)
        )
        self._kernels: dict[str, Future[Any]] = {}
        self._sources: dict[Source, Future[Any]] = {}
        self._stand_ins: list[_StandIn] = []
        self.markers: set[Path] = set()
        """Of what is found; they may be made once it is compiled."""

    def __len__(self) -> int:
        return len(self._kernels) + len(self._sources)

    @property
    def waiting(self) -> Compiling:
        """For a body that launches for real: sources that are being compiled are waited for."""
        return Compiling(self._sources)

    @property
    def has_processes(self) -> bool:
        """Else compiling holds up whatever this process does."""
        return self._workers is not None

    def find(self, run: Callable[[], None]) -> None:
        """A dry run. Raises what ``run`` raises; what it had found then is compiled."""
        token = _is_dry.set(True)
        try:
            with _dry_run(self._pool, self._submit), _zeros(), compiled_by(Compiling(self._sources, self._submit_own)):
                run()
        finally:
            _is_dry.reset(token)

    def finish(self) -> None:
        """Wait for all, and install them. Failures are logged."""
        futures = [*self._kernels.values(), *self._sources.values()]
        wait(futures)
        for failed in filter(None, [future.exception() for future in futures]):
            logger.warning("a kernel could not be precompiled: %s: %s", type(failed).__name__, failed)
        for stand_in in self._stand_ins:
            if not stand_in.has_failed:
                stand_in.install()
        self._stand_ins.clear()

    def close(self) -> None:
        """Wait for all, as `finish`: kernels that nobody compiles could never be launched. Then end the threads."""
        self.finish()
        self._pool.shutdown()

    def _submit(self, key: str, compile_fn: Callable[[], Any], install: Callable[[Any], None]) -> _StandIn:
        """A kernel of Triton. ``install`` sets what is launched from now on."""
        from triton import knobs

        job = None if self._workers is None else describe_job(compile_fn, str(knobs.cache.dir))

        def compile_and_load() -> Any:
            if self._workers is not None and job is not None:
                self._workers.compile(job)
            kernel = _parse_again(compile_fn)  # finds in the cache what a worker has compiled
            assert kernel.run is not None, "reading it builds the C launcher and loads the code"
            return kernel

        # one compilation for equal kernels, but every caller's cache entry must be replaced at the end
        if key not in self._kernels:
            self._kernels[key] = self._pool.submit(compile_and_load)
        self._stand_ins.append(_StandIn(self._kernels[key], install))
        install(self._stand_ins[-1])
        return self._stand_ins[-1]

    def _submit_own(self, source: Source) -> Future[Any]:
        """Own CUDA C++. What is not in the cache afterwards is compiled where it is used."""

        def compile_into_cache() -> None:
            job = msgspec.json.encode(SourceJob(*source))
            if self._workers is None or not self._workers.compile(job):
                compile_source(*source)

        return self._pool.submit(compile_into_cache)


def _parse_again(compile_fn: Callable[[], Any]) -> Any:
    """Call a function that may parse a kernel's source. In Python 3.11 threads that parse at the same time count in
    one place how deep they are, and one that notices raises `SystemError`."""
    for _ in range(PARSES - 1):
        try:
            return compile_fn()
        except SystemError as error:
            logger.debug("a kernel is parsed again: %s", error)
    return compile_fn()


_is_dry: ContextVar[bool] = ContextVar("is_dry", default=False)
_ahead: ContextVar[_Compilations | None] = ContextVar("ahead", default=None)


def is_dry_run() -> bool:
    """Whether launches are skipped: nothing can be measured, and nothing that a kernel wrote may be kept."""
    return _is_dry.get()


def _dry_run(pool: Executor, submit: Callable[[str, Callable[[], Any], Callable[[Any], None]], _StandIn]) -> Any:
    """A context in which launches of kernels that this process has not compiled are skipped, and the kernels passed on
    to ``submit``."""
    from triton import AsyncCompileMode

    class DryRun(AsyncCompileMode):
        def submit(
            self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], *_: Any
        ) -> _StandIn:
            """Triton 3.9 passes a further argument, to undo what ``finalize_fn`` does."""
            return submit(key, compile_fn, finalize_fn)

    return DryRun(pool)


class _Alone:
    """Makes one launcher at a time.

    Before Triton 3.7 each signature has a launcher in C, and all of these are modules of one name. Of a file that was
    loaded before, as kernels with one signature share it, Python fills the module of that name that was loaded *last*
    with the file's functions, and gives that. A thread that does so between another's loading and reading of its module
    would leave it the launcher of another kernel, which takes other arguments.
    """

    def __init__(self, make: Callable[..., Any]):
        self._make, self._lock = make, Lock()

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            return self._make(*args)


def _load_launchers_alone() -> None:
    """In this process, from now on."""
    from triton.runtime import driver

    if not isinstance(driver.active.launcher_cls, _Alone):
        driver.active.launcher_cls = _Alone(driver.active.launcher_cls)


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


@contextmanager
def compile_ahead(run: Callable[[], None], about: str, device: torch.device) -> Iterator[None]:
    """Find kernels by a dry run of ``run``, unless that was done before on this machine, and compile them while the
    body goes on, which waits for those that it launches; the end waits for all. What `precompile` found in ``run``, it
    need not find again in the body. A ``run`` that fails costs nothing but the kernels that it did not reach; it is not
    called without processes that compile."""
    marker = _marker_of(about, device) if _has_compiler(device) and find_workers() is not None else None
    if marker is None or marker.exists():
        yield
        return
    began, own = time.perf_counter(), _Compilations(device)
    token = _ahead.set(own)
    try:
        if own.has_processes:
            _find(own, run, logging.DEBUG)
            own.markers.add(marker)
            logger.info("%d kernels found ahead in %.1f s", len(own), time.perf_counter() - began)
        with compiled_by(own.waiting):
            yield
    finally:
        _ahead.reset(token)
        own.close()
    for done in own.markers:
        _touch(done)
    logger.info("%d kernels compiled in %.1f s, beside other work", len(own), time.perf_counter() - began)


def precompile(run: Callable[[], None], about: str, device: torch.device) -> int:
    """Call ``run``, which does what later steps will do (on meaningless numbers), and compile the kernels that it would
    launch. Returns their number. Failures are logged: if ``run`` fails, kernels that it did not reach are compiled at
    their first launch; a kernel that does not compile raises its error when it is launched. A marker in Triton's cache
    makes later calls for the same ``about`` (the model and its sizes) no-ops, without calling ``run``."""
    if not _has_compiler(device):
        return 0
    marker, ahead = _marker_of(about, device), _ahead.get()
    if marker.exists() or (ahead is not None and marker in ahead.markers):
        return 0
    if ahead is not None and is_dry_run():
        run()
        ahead.markers.add(marker)
        return 0
    began, own = time.perf_counter(), ahead or _Compilations(device)
    try:
        _find(own, run, logging.WARNING)
        ran = time.perf_counter()
        own.finish()
    finally:
        if ahead is None:
            own.close()
    _touch(marker)
    took = time.perf_counter() - began
    logger.info("%d kernels found in %.1f s and compiled in %.1f s", len(own), ran - began, took)
    return len(own)


def _find(own: _Compilations, run: Callable[[], None], level: int) -> None:
    try:
        own.find(run)
    except FAULTS as error:
        logger.log(level, "kernels are compiled at their first launch: %s: %s", type(error).__name__, error)


def _has_compiler(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


def _marker_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir) / "headrace"


def _touch(marker: Path) -> None:
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        logger.warning("every start looks for kernels again, as Triton's cache cannot be written: %s", error)


def _marker_of(about: str, device: torch.device) -> Path:
    """A file in Triton's cache folder, so that it disappears with the compiled kernels."""
    import triton

    facts = (
        triton.__version__, torch.__version__, str(torch.cuda.get_device_capability(device)), about, _digest_sources()
    )
    return _marker_folder() / hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


@cache
def _digest_sources() -> str:
    """Any change of a kernel's source makes new markers. Read once: a start asks for a dozen."""
    digest = hashlib.sha256()
    for path in sorted([*Path(__file__).parent.rglob("*.py"), *CUDA_FOLDER.glob("*.cu*")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
