"""The GPU driver's own library enters, the GPUs that this process sees leave. Without torch, and without a context.

CUDA's driver and HIP have the same calls under different names. Both heed the variables by which a launcher binds GPUs,
which NVML does not.
"""

import ctypes
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from mpidp.tools.doctor.facts import Gpu, Gpus

PCI = Path("/sys/bus/pci/devices")
_LIBRARIES = (("cuda", "cu", "libcuda.so.1"), ("hip", "hip", "libamdhip64.so"))
_NAME_BYTES, _PCI_BYTES, _UUID_BYTES = 128, 32, 16


def gpus() -> Gpus:
    """Look for GPUs; no driver means none."""
    files = _device_files(Path("/dev"))
    for driver, prefix, name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:  # no such driver on this node
            continue
        seen, error = seen_by(library, prefix)
        return Gpus(driver, tuple(seen), files, links(seen) if driver == "cuda" else {}, error)
    return Gpus(device_files=files)


def seen_by(library: ctypes.CDLL, prefix: str) -> tuple[list[Gpu], str]:
    """Ask a driver for the GPUs of this process; also its error, or ""."""
    call = _Calls(library, prefix)
    count = ctypes.c_int(0)
    error = call("Init", 0) or call(_count_name(prefix), ctypes.byref(count))
    if error:
        return [], f"the driver gave error {error}"
    return [_describe(call, index) for index in range(count.value)], ""


def links(seen: list[Gpu]) -> dict[str, str]:
    """How pairs of GPUs are connected, by NVML; empty without the package nvidia-ml-py or without pairs."""
    if len(seen) < 2:
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    names = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
        pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "a PCIe host bridge",
        pynvml.NVML_TOPOLOGY_NODE: "the NUMA node",
        pynvml.NVML_TOPOLOGY_SYSTEM: "the link between sockets",
    }
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByPciBusId(gpu.pci.encode()) for gpu in seen]
        pairs = [(a, b) for b in range(len(handles)) for a in range(b)]
        found = {f"{a}-{b}": pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b]) for a, b in pairs}
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"all": f"something that NVML cannot tell ({error})"}
    return {pair: names.get(level, str(level)) for pair, level in found.items()}


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers in a kernel's list, such as "0-3,8"."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


class _Calls:
    """A driver's functions; calling one gives its error code."""

    def __init__(self, library: ctypes.CDLL, prefix: str):
        self._library, self._prefix = library, prefix

    def __call__(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, self._prefix + name)(*arguments))


def _count_name(prefix: str) -> str:
    return "DeviceGetCount" if prefix == "cu" else "GetDeviceCount"


def _describe(call: _Calls, index: int) -> Gpu:
    # cuDeviceGet and hipDeviceGet turn an index into what the other calls want, which is the same number so far.
    device = ctypes.c_int(index)
    call("DeviceGet", ctypes.byref(device), index)
    name, pci = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_PCI_BYTES)
    raw = ctypes.create_string_buffer(_UUID_BYTES)
    call("DeviceGetName", name, _NAME_BYTES, device)
    call("DeviceGetPCIBusId", pci, _PCI_BYTES, device)
    call("DeviceGetUuid", raw, device)
    place = pci.value.decode().lower()
    return Gpu(index, name.value.decode(), f"GPU-{uuid.UUID(bytes=raw.raw)}", place, *_beside(PCI / place))


def _beside(device: Path) -> tuple[int, tuple[int, ...]]:
    """The NUMA node of a device and the cores of it, as far as the kernel tells."""
    numa, cores = device / "numa_node", device / "local_cpulist"
    return int(numa.read_text()) if numa.exists() else -1, parse_cores(cores.read_text()) if cores.exists() else ()


def _device_files(folder: Path) -> int:
    nvidia = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(folder))
    return nvidia or int((folder / "kfd").exists())


def visible(environment: Mapping[str, str]) -> str:
    """The variables that choose GPUs, for a message; "" where none is set."""
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
