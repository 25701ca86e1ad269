"""Environment variables enter, those that decide how a job runs leave. Not all: some launchers put secrets there."""

from collections.abc import Mapping

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
