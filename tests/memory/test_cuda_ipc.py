"""Memory of a GPU that processes share: who may use it, and that bytes travel between two of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.base import env
from headrace.base.config import engine_config
from headrace.base.disaggregation import DisaggregationConfig
from headrace.base.errors import ConfigError, TransferFailed
from headrace.execution.tiers import device_region_bytes
from headrace.memory.transfer.contract import Copy, Region, create_backend
from headrace.memory.transfer.device_region import DeviceRegion

SIZE = 3 << 20  # not a whole number of the driver's units
WRITER = """
import sys
from headrace.memory.transfer.contract import Copy, create_backend
from headrace.memory.transfer.device_region import DeviceRegion
own = DeviceRegion.open(int(sys.argv[1]), int(sys.argv[2]), 0)
peer = create_backend("cuda-ipc", own).connect(bytes.fromhex(sys.stdin.readline()))
peer.write([Copy(5, 4096, 70_000), Copy(0, 1000, 1)])
print("written", flush=True)
sys.stdin.readline()
peer.write([Copy(0, 0, int(sys.argv[2]))])
print("late", flush=True)
sys.stdin.readline()
"""


def test_it_is_for_gpus_alone():
    region = Region.create(4096)
    with pytest.raises(ConfigError, match="take shared-memory"):
        create_backend("cuda-ipc", region)
    region.close()
    role = DisaggregationConfig(disaggregation_mode="decode", disaggregation_transfer_backend="cuda-ipc")
    config = replace(engine_config(model="m", device="cpu"), disaggregation=role)
    with pytest.raises(ConfigError, match="take shared-memory"):
        device_region_bytes(config, torch.device("cpu"))


@pytest.mark.parametrize("text", ["cuda-ipc?gib=much", "cuda-ipc?gib=0", "cuda-ipc?gib=-1", "cuda-ipc?gib=nan"])
def test_its_size_is_a_number(text: str):
    region = Region.create(4096)
    with pytest.raises(ConfigError, match="number of GiB"):
        create_backend(text, region)
    region.close()


def test_no_driver_is_said_plainly(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: not found")))
    with pytest.raises(ConfigError, match=r"no CUDA driver here.*shared-memory"):
        DeviceRegion.create(SIZE, 63)  # a device that no other test has asked for


def as_tensor(region: DeviceRegion) -> torch.Tensor:
    return torch.as_tensor(region, device=f"cuda:{region.driver.device}")


@pytest.mark.cuda
@pytest.mark.parametrize("there_device", [0, 1])
def test_another_process_writes_into_a_region_and_may_outlive_it(there_device: int):
    """Also into that of a GPU which it does not see."""
    torch.cuda.init()
    if there_device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    source, target = DeviceRegion.create(SIZE, 0), DeviceRegion.create(SIZE, there_device)
    data = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    as_tensor(source).copy_(torch.from_numpy(data))
    as_tensor(target).zero_()
    for device in (0, there_device):
        torch.cuda.synchronize(device)
    there = create_backend("cuda-ipc", target)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(source.descriptor), str(SIZE)], pass_fds=[source.descriptor],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env.one_device(0)
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(there.handle().hex() + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "written\n"
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[4096:74_096], expected[1000] = data[5:70_005], data[0]
    assert (as_tensor(target).cpu().numpy() == expected).all()
    there.close()
    target.close()
    del target, there  # unmapped here: what is written late goes to memory that nobody else has
    other = DeviceRegion.create(SIZE, there_device)
    as_tensor(other).zero_()
    torch.cuda.synchronize(there_device)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "late\n"
    assert not as_tensor(other).any()
    process.stdin.close()
    assert process.wait(timeout=30) == 0


@pytest.mark.cuda
def test_writes_outside_of_a_region_are_refused():
    torch.cuda.init()
    here, there = DeviceRegion.create(SIZE, 0), DeviceRegion.create(SIZE, 0)
    as_tensor(here).fill_(1)
    as_tensor(there).zero_()
    torch.cuda.synchronize()
    peer = DeviceRegion.open(os.dup(there.descriptor), SIZE, 0)
    backend = create_backend("cuda-ipc", there)
    destination = create_backend("cuda-ipc", here).connect(backend.handle())
    for copy in (Copy(0, SIZE - 5, 10), Copy(SIZE - 5, 0, 10), Copy(-1, 0, 10), Copy(0, -1, 10)):
        with pytest.raises(TransferFailed, match="outside"):
            destination.write([copy])
    assert not as_tensor(peer).any()
    destination.close()
    backend.close()
