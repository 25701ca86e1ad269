"""Known messages of MPI, Slurm, HDF5 and drivers: what each means and what to do; and the search for them."""

import re
from dataclasses import dataclass

from mpidp.tools.doctor.finding import Finding, Level, ok


@dataclass(frozen=True)
class Known:
    """A text. `pattern` is a regular expression for part of a line; OK means that it is safe to ignore."""

    code: str
    pattern: str
    meaning: str
    fix: str = ""
    level: Level = Level.FAIL


KNOWN = (
    Known(
        "text.no_pmi",
        r"OMPI was not built with SLURM's PMI support|was not built with Slurm PMI support",
        "this Open MPI 4 cannot be started by srun",
        "start it with its own mpiexec inside the job, or load an Open MPI that was built with Slurm's PMI",
    ),
    Known(
        "text.no_pmix",
        r"PMIx_Init failed for the following reason|requires access to a local PMIx server",
        "Open MPI 5 was started by srun without PMIx",
        "srun --mpi=pmix ... (see srun --mpi=list), or its own mpiexec",
    ),
    Known(
        "text.two_pmis",
        r"Found both env vars PMI_SIZE and PMIX_NAMESPACE",
        "one launcher runs inside another, and MPICH sees both",
        "unset PMIX_NAMESPACE for MPICH, or PMI_SIZE for Open MPI",
    ),
    Known(
        "text.singleton",
        r"PMII_singinit: execv failed|unable to execv\(\) hydra",
        "a program that was started without mpiexec does not find Hydra",
        "start it with mpiexec -n 1, or put the folder of mpiexec on PATH",
    ),
    Known(
        "text.psec",
        r"psec.*munge|munge.*psec|PMIX ERROR.*psec",
        "PMIx is set to authenticate with munge, which this container does not have",
        "export PMIX_MCA_psec=native",
    ),
    Known(
        "text.gds",
        r"gds[_/ ](ds12|ds21|shmem2?)|PMIX ERROR.*gds",
        "the PMIx versions of the launcher and of the library use different data stores",
        "export PMIX_MCA_gds=hash",
    ),
    Known(
        "text.pmi2_init",
        r"PMI2 init failed: 1|PMI2_Init failed",
        "this MPI starts under srun only, as on many login nodes",
        "srun -n 1 ...; mpidp --help, submit and status start no MPI",
    ),
    Known(
        "text.pmi2_value",
        r"value not properly terminated in client request|MPIDI_UCX_comm_addr_exchange",
        "MPICH with UCX sends lines to Slurm's PMI-2 that are longer than it accepts",
        "export MPIR_CVAR_CH4_NETMOD=ofi, or load the site's own MPICH",
    ),
    Known(
        "text.cuda_ipc",
        r"cuIpcOpenMemHandle failed|cuIpcGetMemHandle failed",
        "each rank sees its own GPU only, so MPI cannot open its neighbour's memory",
        "use --gpus-per-node=N instead of --gpus-per-task or --gpu-bind, or MPIDP_CUDA_AWARE=0",
    ),
    Known(
        "text.gpu_segfault",
        r"Signal code: Invalid permissions \(2\)",
        "MPI was given GPU memory, which it does not support here",
        "MPIDP_CUDA_AWARE=0: gradients then go through pinned host memory",
    ),
    Known(
        "text.gtl",
        r"GPU_SUPPORT_ENABLED is requested, but GTL library is not linked",
        "Cray MPICH was loaded without its GPU transport layer (GTL)",
        "load craype-accel-... and preload its libmpi_gtl, or set MPICH_GPU_SUPPORT_ENABLED=0",
    ),
    Known(
        "text.cma",
        r"Read -1, expected \d+, errno = 1",
        "a container forbids copies between processes",
        "OMPI_MCA_smsc=^cma (Open MPI 5), OMPI_MCA_btl_vader_single_copy_mechanism=none (4), or SYS_PTRACE",
    ),
    Known(
        "text.shm",
        r"not enough space for .*(shared.memory|backing file)|No space left on device.*/dev/shm|signal 7 \(Bus error\)",
        "/dev/shm is full or too small",
        "start the container with --shm-size=8g, or OMPI_MCA_btl_sm_backing_directory=/tmp",
    ),
    Known(
        "text.slots",
        r"There are not enough slots available in the system",
        "Open MPI starts at most one rank per core by default",
        "mpiexec --map-by :OVERSUBSCRIBE, or PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
    ),
    Known(
        "text.root",
        r"mpi(exec|run) has detected an attempt to run as root",
        "Open MPI refuses to run as root by default",
        "run as another user; in a container OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
    Known(
        "text.fork",
        r'operation involving a call to the "?fork\(\)"? system|RDMAV_FORK_SAFE',
        "a process that uses a fast network has forked, which may hang or corrupt data",
        "DataLoader(num_workers=0) or multiprocessing_context='spawn'; mpidp reads in threads",
        level=Level.WARN,
    ),
    Known(
        "text.component",
        r"mca_base_component_repository_open: unable to open",
        "safe to ignore: Open MPI has a component for a network library that is not installed",
        level=Level.OK,
    ),
    Known(
        "text.osc_ucx",
        r"osc_ucx_component\.c",
        "safe to ignore: Open MPI tried UCX for a window and uses another component",
        level=Level.OK,
    ),
    Known(
        "text.no_fabric",
        r"WARNING: There (was an error initializing an|are more than one active ports) OpenFabrics|No OpenFabrics conn",
        "safe to ignore: Open MPI's old component for InfiniBand is not used; UCX is",
        level=Level.OK,
    ),
    Known(
        "text.two_ucx",
        r"undefined symbol: (ucm_set_global_opts|uc[a-z]_\w+)",
        "two UCX libraries are mixed",
        "mpidp doctor prints both paths; take one out of LD_LIBRARY_PATH",
    ),
    Known(
        "text.no_mpi",
        r"cannot load (an )?MPI library",
        "mpi4py finds no MPI library",
        "load the site's MPI module, pip install mpich, or name the file in MPI4PY_LIBMPI",
    ),
    Known(
        "text.locks",
        r"[Uu]nable to (synchronously )?(open|lock) file.*(lock file|No locks|errno = (11|35|37|524))",
        "the file system has no locks; mpidp opens files without them, another program does not",
        "export HDF5_USE_FILE_LOCKING=FALSE before it starts",
    ),
    Known(
        "text.locked_memory",
        r"ibv_reg_mr.*Cannot allocate memory|ibv_create_\w+.*Cannot allocate memory",
        "the limit on locked memory is too low for the network",
        "ulimit -l unlimited; in Slurm LimitMEMLOCK=infinity and PropagateResourceLimitsExcept=MEMLOCK",
    ),
    Known(
        "text.scontrol",
        r"scontrol: (command )?not found|'scontrol'.*No such file",
        "Slurm's commands are not in this container",
        "requeue in the batch script, outside of it: jobs/preemptible.sbatch does",
        level=Level.WARN,
    ),
    Known(
        "text.out_of_memory",
        r"oom[-_ ]kill|Out Of Memory|CUDA out of memory",
        "a rank ran out of memory, and the others waited for it",
        "a smaller data.global_batch or more --mem; srun -K ends the others at once",
    ),
    Known(
        "text.torch_zip",
        r"PytorchStreamReader failed",
        "a checkpoint file is damaged",
        "mpidp checkpoint verify RUN; mpidp resumes from the newest whole one",
    ),
    Known(
        "text.port",
        r"EADDRINUSE|Address already in use",
        "another program took the port that torch.distributed was given",
        "mpidp needs no port: look for torch.distributed in your own code",
    ),
    Known(
        "text.truncated",
        r"truncated file: eof = \d+",
        "an HDF5 file is shorter than its header says",
        "copy it again; mpidp data verify FILE",
    ),
    Known(
        "text.filter",
        r"required filter '?\S*'? is not registered|can't open directory.*hdf5/lib/plugin",
        "HDF5 lacks a filter of this file",
        "pip install hdf5plugin",
    ),
)


_SHOWN = 100
_SEARCHED = 10_000  # of a line; patterns take time with its square


def read_log(text: str) -> list[Finding]:
    """Look for known texts, in the order in which they first appear."""
    found: dict[str, Finding] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for known in KNOWN:
            if known.code not in found and re.search(known.pattern, line[:_SEARCHED]):
                what = f"line {number}, {line.strip()[:_SHOWN]!r}: {known.meaning}"
                found[known.code] = Finding(known.level, known.code, what, known.fix)
    if not found:
        return [ok("text", f"none of {len(KNOWN)} known texts of MPI, Slurm, HDF5 and drivers is in it")]
    return list(found.values())
