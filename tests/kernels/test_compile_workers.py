"""Processes that compile kernels: what they import from, and that none is waited for without end."""

from __future__ import annotations

import fcntl
import hashlib
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from headrace.kernels import compile_workers, cuda_source, early, nvrtc
from headrace.kernels.compile_workers import CompileWorkers
from headrace.kernels.sharing import alone

HANGS = """
import os, sys, time, types
sys.modules["torch"] = types.ModuleType("torch")
from headrace.kernels import compile_workers
compile_workers.JOB_SECONDS, compile_workers.run_job = 1, lambda message: time.sleep(60)
compile_workers.serve(int(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose modules would end who imports them."""
    for name in ("queue", "msgspec", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return tmp_path


def count_children(first: subprocess.Popen[bytes], wanted: int) -> list[psutil.Process]:
    """Those of a process, once there are as many as ``wanted``."""
    until = time.monotonic() + 60
    while len(found := psutil.Process(first.pid).children()) != wanted:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def wait_for(first: subprocess.Popen[bytes]) -> None:
    """Its end, which another thread waits for."""
    until = time.monotonic() + 30
    while first.returncode is None:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_job_that_hangs_ends_its_process(tmp_path: Path) -> None:
    listener, (ours, theirs) = compile_workers._open_socket(tmp_path), socket.socketpair()
    command = [sys.executable, "-c", HANGS, str(listener.fileno()), str(theirs.fileno())]
    hanging = subprocess.Popen(command, pass_fds=(listener.fileno(), theirs.fileno()))
    listener.close()
    assert not CompileWorkers(1, tmp_path).compile(b"a job") and hanging.wait(60) == -signal.SIGALRM
    ours.close()
    theirs.close()


def test_processes_import_nothing_from_the_working_folder_and_leave_no_zombie(no_torch: Path) -> None:
    """They are copies of one that has torch; an engine that ends, or lets go of them, ends all."""
    workers = CompileWorkers(3, no_torch / "workers")
    assert workers.start()
    first = workers._first
    assert first is not None and [workers.ask(b"no job") for _ in range(4)] == [b"failed\n"] * 4
    copies = count_children(first, 3)  # the one that builds Triton's driver ends
    copies[0].kill()  # the others go on
    copies[0].wait(30)
    assert [workers.ask(b"no job") for _ in range(4)] == [b"failed\n"] * 4
    del workers
    wait_for(first)  # without asking
    assert first.returncode == 0


def test_ranks_share_them(no_torch: Path) -> None:
    """However long the name of the folder: whoever comes first starts them, and the others ask the same ones, until the
    first one ends. What two ask for at once is done once."""
    folder = no_torch / ("x" * 120)
    own, other = CompileWorkers(2, folder), CompileWorkers(2, folder)
    assert not other.were_started and own.start() and other.start() and other.were_started
    assert other._first is None and other.ask(b"no job") == b"failed\n"
    assert (folder / compile_workers.SOCKET).stat().st_mode & 0o777 == 0o600
    lock = folder / f"{hashlib.sha256(b'a job').hexdigest()[:20]}.lock"
    with ThreadPoolExecutor(2) as pool, alone(lock):
        same, another = pool.submit(other.compile, b"a job"), pool.submit(other.compile, b"another job")
        assert another.result(60) is False and not same.done()
    assert same.result(60), "whoever was waited for has done it"
    first = own._first
    assert first is not None
    del own
    wait_for(first)
    assert not other.compile(b"a job"), "then it compiles itself"
    assert other.start() and other._first is not None, "or starts them again"


def test_a_rank_does_without_where_nobody_opens_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "SOCKET_SECONDS", 0.05)
    workers = CompileWorkers(2, tmp_path)
    with workers._lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not workers.start()


def test_the_first_start_on_a_machine_with_a_gpu_starts_them_before_torch_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def pretend(count: int, lock: int, listener: int) -> tuple[None, None]:
        started.append(count)
        return None, None

    workers = CompileWorkers(1, tmp_path / "workers")
    monkeypatch.setattr(early, "find_workers", lambda: workers)
    monkeypatch.setattr(early, "_initialise", lambda: None)
    monkeypatch.setattr(compile_workers, "_start", pretend)
    monkeypatch.setattr(early, "DRIVER_FILES", (tmp_path / "driver",))
    early.start_early()
    assert not started, "there is no GPU"
    (tmp_path / "driver").touch()
    early.start_early()
    assert len(started) == 1
    early.start_early()
    assert len(started) == 1, "kernels were compiled here before"
    code = "import headrace.service.ranks.starting, headrace.service.process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_they_keep_bytecode_where_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_folder: bool, writes: bool
):
    folder = str(tmp_path / "bytecode") if has_folder else None  # this process writes there, too
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    code = "import sys; print(sys.pycache_prefix, sys.dont_write_bytecode)"
    command = [sys.executable, *compile_workers._bytecode_options(), "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60).split() == [str(folder), str(not writes)]


class Nvrtc:
    """A library that compiles nothing itself."""

    def nvrtcVersion(self, major: object, minor: object) -> None:
        pass


def test_own_cuda_that_a_dry_run_wants_is_compiled_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "open_nvrtc", Nvrtc)
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: b"code")
    wanted: list[cuda_source.Source] = []

    @cuda_source.cache_compiled
    def find(name: str, *, blocks: int) -> list[bytes]:
        return [cuda_source.compile_source(name, ("-arch=sm_90a", f"-DBLOCKS={blocks}"))]

    @cuda_source.cache_compiled
    def can_find(name: str) -> bool:
        return bool(find(name, blocks=1))

    def take(source: cuda_source.Source) -> Future[None]:
        wanted.append(source)
        return Future()

    with cuda_source.compiled_by(cuda_source.Compiling({}, take)):
        assert find("streams", blocks=1) == [cuda_source.NOT_YET] and can_find("streams")
        assert find("streams", blocks=1) is find("streams", blocks=1), "a layer asks for it in each step"
        kernel = cuda_source.CudaKernel(cuda_source.NOT_YET, "mix_streams", 0)
        kernel.launch(1, 32, is_dependent=True)  # nothing, without a GPU
        assert kernel.count_resident(32) == 1
    assert wanted == [("streams", ("-arch=sm_90a", "-DBLOCKS=1"))], "once, though every layer asks"
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: (_ for _ in ()).throw(cuda_source.CudaSourceError("no")))
    with pytest.raises(cuda_source.CudaSourceError):
        can_find("streams")  # neither was cached, so that callers can choose another kernel
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: b"code")
    assert find("streams", blocks=1) == [b"code"] and find("streams", blocks=1) is find("streams", blocks=1)


def test_a_dry_run_launches_no_kernel_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read what kernels that are not compiled yet should have written."""
    called: list[str] = []
    monkeypatch.setattr(cuda_source, "call_driver", lambda name, *_: called.append(name))
    monkeypatch.setattr(cuda_source, "_enter_context", lambda device: None)
    monkeypatch.setattr(cuda_source, "current_stream", lambda device: 0)
    for name in ("current_stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    kernel = cuda_source.CudaKernel(b"code", "mix_streams", 0)
    called.clear()
    with cuda_source.compiled_by(cuda_source.Compiling({}, lambda source: Future())):
        kernel.launch(1, 32)
    assert not called
    with cuda_source.compiled_by(cuda_source.Compiling({})):
        kernel.launch(1, 32)
    assert called == ["cuLaunchKernelEx"]


def test_own_cuda_is_compiled_with_what_it_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in nvrtc.FOLDER.glob("*.cu"):
        assert b"#include" not in nvrtc.read_source(path.stem), path.name
    source, header = tmp_path / "scale.cu", tmp_path / "numbers.cuh"
    source.write_text('// doubles\n#include "numbers.cuh"\nkernel();\n')
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    monkeypatch.setattr(nvrtc, "open_nvrtc", Nvrtc)
    monkeypatch.setattr(nvrtc, "_compile", lambda library, text, *_: text)
    for factor in (b"2", b"3"):  # another header is another source: the cache does not give the first one again
        header.write_bytes(b"factor = " + factor)
        code = cuda_source.compile_source("scale", ("-arch=sm_90a",))
        assert code == b"// doubles\nfactor = " + factor + b"\nkernel();\n"


def test_own_cuda_runs_where_it_cannot_be_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").touch()  # in place of a folder
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "open_nvrtc", Nvrtc)
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: b"code")
    assert cuda_source.compile_source("streams", ("-arch=sm_90a",)) == b"code"
    assert "cannot be cached" in caplog.text
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "other"))
    assert cuda_source.compile_source("streams", ("-arch=sm_90a",)) == b"code"
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("it is cached"))
    assert cuda_source.compile_source("streams", ("-arch=sm_90a",)) == b"code"
    assert [path.suffix for path in (tmp_path / "other" / "cuda").iterdir()] == [".cubin"]


@pytest.mark.parametrize("code", [0, 100])
def test_the_driver_is_initialised_beside_imports(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(early, "DRIVER_FILES", (tmp_path / "driver",))
    monkeypatch.setattr(early, "ctypes", Mock(CDLL=lambda name: Mock(cuInit=lambda flags: calls.append(flags) or code)))
    assert not early.open_driver() and not calls, "there is no GPU"
    (tmp_path / "driver").touch()
    assert early.open_driver()
    for thread in threading.enumerate():
        if thread.name == "cuda-driver":
            thread.join(10)
    assert calls == [0]


def test_a_driver_that_cannot_be_opened_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "DRIVER", str(tmp_path / "nothing.so"))
    early._initialise()
