"""Doctor's facts: of this machine, of folders like those of other machines, and of a driver made for the test."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest

from mpidp.tools.doctor.facts import Child, chosen, gather, torch_built_for, versions
from mpidp.tools.doctor.machine import (
    Gpu,
    container,
    cores,
    cross_memory_error,
    data_file,
    links,
    memory,
    quota,
    seen_by,
    site_libraries,
)

DRIVER = r"""
#include <string.h>
int PREInit(unsigned flags) { return ERROR; }
int COUNT(int *count) { *count = 2; return 0; }
int PREDeviceGet(int *device, int index) { *device = index; return 0; }
int PREDeviceGetName(char *name, int size, int device) { strncpy(name, "Test GPU", size); return 0; }
int PREDeviceGetPCIBusId(char *id, int size, int device) {
    strncpy(id, device ? "0000:C1:00.0" : "0000:41:00.0", size);
    return 0;
}
int PREDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, 0x11 * (device + 1), 16); return 0; }
"""
COUNTS = {"cu": "cuDeviceGetCount", "hip": "hipGetDeviceCount"}


def make_driver(folder: Path, prefix: str, error: int) -> ctypes.CDLL:
    """Compile a driver with two GPUs."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "driver.c", folder / f"driver_{prefix}.so"
    source.write_text(DRIVER.replace("PRE", prefix).replace("COUNT", COUNTS[prefix]).replace("ERROR", str(error)))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.job
@pytest.mark.parametrize("prefix", COUNTS)
def test_a_driver_tells_of_its_gpus(tmp_path: Path, prefix: str) -> None:
    """Behaviour 38: by UUID and PCI address, in the order of torch's numbers."""
    seen, error = seen_by(make_driver(tmp_path, prefix, 0), prefix)
    assert error == ""
    assert [(gpu.index, gpu.name, gpu.pci) for gpu in seen] == [
        (0, "Test GPU", "0000:41:00.0"),
        (1, "Test GPU", "0000:c1:00.0"),
    ]
    assert [gpu.uuid for gpu in seen] == [
        "GPU-11111111-1111-1111-1111-111111111111",
        "GPU-22222222-2222-2222-2222-222222222222",
    ]


@pytest.mark.job
def test_a_driver_that_does_not_start(tmp_path: Path) -> None:
    assert seen_by(make_driver(tmp_path, "cu", 100), "cu") == ([], "the driver gave error 100")


class NoAnswerError(Exception):
    """What NVML raises."""


def nvml(level: int | None) -> SimpleNamespace:
    """Make the package, with two GPUs linked at a level, or without an answer."""

    def ancestor(first: str, second: str) -> int:
        assert (first, second) == ("handle 0000:41:00.0", "handle 0000:c1:00.0")
        if level is None:
            raise NoAnswerError("Not Supported")
        return level

    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    return SimpleNamespace(
        **{f"NVML_TOPOLOGY_{name}": 10 * index for index, name in enumerate(levels)},
        NVMLError=NoAnswerError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda pci: f"handle {pci.decode()}",
        nvmlDeviceGetTopologyCommonAncestor=ancestor,
    )


@pytest.mark.parametrize(
    "level, text",
    [(10, "one PCIe switch"), (50, "the link between sockets"), (60, "60"), (None, "NVML cannot tell (Not Supported)")],
)
def test_how_gpus_are_linked(monkeypatch: pytest.MonkeyPatch, level: int | None, text: str) -> None:
    seen = [Gpu(0, "H", "GPU-0", "0000:41:00.0"), Gpu(1, "H", "GPU-1", "0000:c1:00.0")]
    monkeypatch.setitem(sys.modules, "pynvml", nvml(level))
    (link,) = links(seen).values()
    assert text in link
    assert links(seen[:1]) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert links(seen) == {}


@pytest.mark.job
def test_this_machine(tmp_path: Path) -> None:
    """Behaviour 46: without GPU, Slurm, launcher; MPI and HDF5 are asked in children."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = [1, 2]
    facts = gather(str(tmp_path / "a.h5"))
    assert facts.launch.launcher == "none"
    assert set(facts.cores.mask) == os.sched_getaffinity(0)
    assert facts.mpi is not None and facts.mpi_error == ""
    assert (facts.mpi.size, len(facts.mpi.mapped.mpi), facts.mpi.mapped.has_gtl) == (1, 1, False)
    assert facts.mpi.name.startswith(("MPICH", "Open MPI"))
    assert facts.hdf5 is not None and facts.hdf5.h5py == h5py.__version__ and facts.hdf5.filters["deflate"]
    assert facts.hdf5.file_error == ""
    assert facts.file is not None and facts.file.num_bytes > 0 and facts.file.error == ""


def test_limits_of_this_machine() -> None:
    assert cores().node_cores >= len(cores().mask) >= 1
    found = memory()
    assert found.available and found.limit and found.available <= found.limit
    assert found.open_files > 0
    assert cross_memory_error() in ("", "EPERM", "ENOSYS")


@pytest.mark.parametrize("text, expected", [("max 100000", None), ("250000 100000", 2.5)])
def test_cores_that_a_control_group_pays_for(tmp_path: Path, text: str, expected: float | None) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job_7\n")
    (tmp_path / "group" / "job_7").mkdir(parents=True)
    (tmp_path / "group" / "job_7" / "cpu.max").write_text(text + "\n")
    assert quota(tmp_path, tmp_path / "group") == expected
    assert quota(tmp_path / "nothing", tmp_path) is None


def test_kinds_of_containers(tmp_path: Path) -> None:
    assert container({}, tmp_path) == ""
    assert container({"APPTAINER_CONTAINER": "a.sif"}, tmp_path) == "apptainer"
    assert container({"container": "enroot"}, tmp_path) == "enroot"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".containerenv").touch()
    assert container({}, tmp_path) == "podman"
    (tmp_path / ".dockerenv").touch()
    assert container({}, tmp_path) == "docker"


def test_libraries_that_a_module_brings(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    assert site_libraries({"LD_LIBRARY_PATH": f"/nothing:{tmp_path}/lib:"}) == (f"{tmp_path}/lib",)
    assert site_libraries({}) == ()


def test_secrets_of_launchers_are_left_out() -> None:
    environment = {"PMI_SHARED_SECRET": "x", "SLURM_JWT": "x", "HOME": "/x", "PMI_SIZE": "2", "OMPI_MCA_smsc": "^cma"}
    assert chosen(environment) == {"PMI_SIZE": "2", "OMPI_MCA_smsc": "^cma"}


def test_versions_are_those_that_are_imported() -> None:
    import numpy
    import torch

    found = versions()
    assert (found.packages["numpy"], found.packages["torch"]) == (numpy.__version__, torch.__version__)
    assert found.torch_cuda == torch.version.cuda


@pytest.mark.parametrize(
    "source, expected",
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", {"cuda": "12.8"}),
        ("cuda = None\nhip = '6.4'\n__version__ = 'x'\n", {"hip": "6.4"}),
        ("import a\n", {}),
    ],
)
def test_for_what_torch_is_built(source: str, expected: dict[str, str]) -> None:
    assert torch_built_for(source) == expected


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert data_file(str(tmp_path / "no.h5")).error == "No such file or directory"
    (tmp_path / "a").write_bytes(b"123")
    found = data_file(str(tmp_path / "a"))
    assert (found.error, found.num_bytes, found.lock_error) == ("", 3, "")


@pytest.mark.job
@pytest.mark.parametrize(
    "body, line, error",
    [
        ("print('noise'); print('{1}'); print('more')", "{1}", ""),
        ("raise ValueError('bad')", "", "exit code 1: .*ValueError: bad"),
        ("import os; os.abort()", "", "exit code -6: "),
        ("print('no answer')", "", "exit code 0: no message"),
        ("import time; time.sleep(60)", "", "no answer within 2 s"),
    ],
)
def test_a_child_that_answers_fails_crashes_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, line: str, error: str
) -> None:
    (tmp_path / "asked.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = Child("asked").answer(2.0 if "sleep" in body else 30.0)
    assert answer.line == line
    assert re.search(error, answer.error)
