"""The only place that reads environment variables; at most ten of them, each documented here."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")

VARIABLES = {
    "HEADRACE_API_KEY": "the same as --api-key, which other users of the machine can see",
    "HEADRACE_CACHE": (
        "folder for compiled kernels, bytecode and converted files (default: headrace in XDG_CACHE_HOME)"
    ),
    "HEADRACE_CPU_ISA": (
        "best instruction set that own CPU kernels may use: scalar, avx2, avxvnni, avx512 or amx; off: plain torch "
        "alone"
    ),
    "HEADRACE_DISABLE_PLUGINS": "comma-separated plug-in names (families, backends, kernels) never to be loaded",
    "HEADRACE_LOG_LEVEL": "debug, info, warning or error (default: info)",
    "HF_HOME": "where the Hugging Face cache lives (default: huggingface in XDG_CACHE_HOME)",
    "HF_HUB_OFFLINE": "1: never ask the Hugging Face hub",
    "OMP_NUM_THREADS": "CPU threads when --threads is not given",
    "TORCH_EXTENSIONS_DIR": (
        "where torch builds extensions of installed plug-ins (default: torch_extensions in XDG_CACHE_HOME)"
    ),
    "XDG_CACHE_HOME": "folder of the caches of all programs (default: ~/.cache)",
}


OPTIONS = frozenset({"HEADRACE_API_KEY", "OMP_NUM_THREADS"})
"""Variables that set options of a command, and win over its file of options."""


def home() -> Path:
    """The user's home folder. In a container without one, sets ``HOME`` to the root folder: libraries raise otherwise.
    """
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = os.sep
    return Path.home()


def _user_cache() -> Path:
    """The user's folder for caches; a relative ``XDG_CACHE_HOME`` is invalid by its specification and ignored."""
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return stated if stated.is_absolute() else home() / ".cache"


def cache_dir() -> Path:
    """Folder for everything Headrace may rebuild."""
    return Path(os.environ.get("HEADRACE_CACHE") or _user_cache() / "headrace")


def torch_extensions_dir() -> Path:
    """Where torch builds the extensions of plug-ins; our own kernels are built in `cache_dir`."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or _user_cache() / "torch_extensions")


def cpu_isa() -> str | None:
    """The best instruction set that own CPU kernels may use; None: whatever the machine has."""
    return os.environ.get("HEADRACE_CPU_ISA", "").lower() or None


def disabled_plugins() -> frozenset[str]:
    """Names that registries must treat as unavailable."""
    return frozenset(n.strip() for n in os.environ.get("HEADRACE_DISABLE_PLUGINS", "").split(",") if n.strip())


def disable_plugins(names: str) -> None:
    """Disable further plug-ins in this process and those it starts; ``names`` is comma-separated."""
    wanted = disabled_plugins() | {name.strip() for name in names.split(",") if name.strip()}
    if wanted:
        os.environ["HEADRACE_DISABLE_PLUGINS"] = ",".join(sorted(wanted))


def log_level() -> str:
    """Name of the logging level, lower case."""
    return os.environ.get("HEADRACE_LOG_LEVEL", "info").lower()


def set_log_level(level: str) -> None:
    """Let this process and those it starts log from this level on."""
    os.environ["HEADRACE_LOG_LEVEL"] = level


def api_key() -> str | None:
    """The key clients must send, when it is not given as a flag."""
    return os.environ.get("HEADRACE_API_KEY")  # an empty one is not the same as none: it is refused


def hub_offline() -> bool:
    """Whether the user forbade network look-ups of models."""
    return os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "TRUE", "yes")


def omp_num_threads() -> int | None:
    """Threads the user asked OpenMP for, if any."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def worker_environment() -> dict[str, str]:
    """Environment for a process that will import torch.

    ``OMP_WAIT_POLICY=PASSIVE`` must be set before torch is imported: libgomp's default spinning makes two threads
    tens of times slower when cores are shared with the HTTP process.
    """
    return {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def visible_devices() -> list[str] | None:
    """The GPUs that the user lets this process see; None where nothing is said, and all are."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    if stated is None:
        return None
    names = [name.strip() for name in stated.split(",")]
    return [name for name in takewhile(lambda name: name != "-1", names) if name]  # CUDA ends there, too


def one_device(index: int) -> dict[str, str]:
    """Environment for a process that shall see one GPU alone: the ``index``-th of those that this process sees, none
    where it sees fewer."""
    visible = visible_devices()
    name = str(index) if visible is None else visible[index] if index < len(visible) else ""
    return {"CUDA_VISIBLE_DEVICES": name}


def set_passive_waiting() -> None:
    """Apply the same waiting policy to this process; has an effect only before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def use_interface(name: str) -> None:
    """Have the collectives of Gloo and NCCL use a network interface, unless the user has chosen one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def quieten_mooncake() -> None:
    """Leave only warnings of Mooncake's library in the log, unless the user says otherwise; before it is imported."""
    os.environ.setdefault("GLOG_minloglevel", "1")


def find_groups(controller: str) -> list[Path]:
    """Cgroup folders (v1 or v2) that may hold a limit of a controller (``cpu``, ``memory``) for this process, innermost
    first; inside a container the outermost is the container's own. Some may not exist."""
    try:
        lines = OWN_GROUP.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        # ``id:controllers:path``; the line of cgroup v2 has no controllers.
        _, controllers, name = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = GROUPS / controller if controllers else GROUPS
            own = root / name.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent == root or root in parent.parents)]
    return folders
