"""`spawn_engine`: starts an engine process, which imports what it needs and waits for its `Launch`.

Standard library alone: a command calls this first and imports the rest of its own modules meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headrace.base import env

ENGINE_MODULE = "headrace.service.process"
ENGINE_BUILDER = "headrace.service.build:build_engine"


def spawn_engine(builder: str = ENGINE_BUILDER) -> subprocess.Popen[bytes]:
    """A new engine process. It ends by itself when its standard input is closed."""
    environment = env.worker_environment() | {"PYTHONPATH": os.pathsep.join(str(Path(p or ".").absolute()) for p in sys.path)}
    return subprocess.Popen([sys.executable, "-P", "-m", ENGINE_MODULE, "--builder", builder], stdin=subprocess.PIPE, env=environment)
