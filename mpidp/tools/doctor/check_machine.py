"""Checks of nodes: containers, cores, memory, GPUs, HDF5 and the data file. Pure."""

from collections.abc import Iterator, Sequence

from mpidp.hdf5.files.library import HDF5Library
from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok, warn
from mpidp.tools.doctor.machine import DataFile, Gpu
from mpidp.tools.table import size_text
from mpidp.world.system import Pinned, crowded, too_few_cores

ATTACH_ADMIN_ONLY = 2  # of /proc/sys/kernel/yama/ptrace_scope
# Docker gives 64 MiB. Gradients of a model with 20 million parameters, of four ranks, need five times as much.
SMALL_SHM_BYTES = 1 << 30
LITTLE_LOCKED_BYTES = 1 << 30
FEW_OPEN_FILES = 1024
# Variables that choose the GPUs a process sees, and those by which Slurm gives each task its own.
CHOOSING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK")


def check_node(facts: RankFacts) -> Iterator[Finding]:
    """What the node and its container do to MPI."""
    system = facts.system
    place = f"in a container ({system.container})" if system.container else "in no container"
    fast = f"; fast network {', '.join(system.fabrics)}" if system.fabrics else ""
    yield ok("node", f"{system.host}, Linux {system.kernel}, {place}{fast}")
    why = f"process_vm_readv: {system.cross_memory}" if system.cross_memory else f"ptrace_scope {system.ptrace_scope}"
    is_blocked = bool(system.cross_memory) or (system.ptrace_scope or 0) >= ATTACH_ADMIN_ONLY
    if is_blocked and facts.environment.get("OMPI_MCA_smsc") != "^cma":
        yield warn(
            "node.copies",
            f"processes may not copy from each other's memory ({why}): Open MPI stops with 'Read -1, expected N, "
            "errno = 1'",
            "docker run --cap-add=SYS_PTRACE; or OMPI_MCA_smsc=^cma (Open MPI 5), for Open MPI 4 "
            "OMPI_MCA_btl_vader_single_copy_mechanism=none",
        )


def check_cores(facts: RankFacts) -> Iterator[Finding]:
    """The mask of one rank, and what limits it."""
    mask, quota = facts.cores.mask, facts.cores.quota
    threads = facts.environment.get("OMP_NUM_THREADS", "not set")
    yield ok("cores", f"{len(mask)} of {facts.cores.node_cores} cores ({ranges(mask)}); OMP_NUM_THREADS {threads}")
    if quota is not None and quota < len(mask):
        yield warn(
            "cores.quota",
            f"the control group limits this process to {quota:g} cores, its mask has {len(mask)}",
            f"set OMP_NUM_THREADS={max(1, int(quota))}, or give the container more (docker run --cpus)",
        )
    wanted = facts.environment.get("SLURM_CPUS_PER_TASK", "")
    if facts.launch.launcher == "Slurm's srun" and wanted.isdecimal() and len(mask) < int(wanted):
        yield warn(
            "cores.srun",
            f"the job has {wanted} CPUs per task, but srun gave this task {len(mask)}: it does not inherit the value",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun",
        )


def check_sharing(job: Sequence[RankFacts]) -> Iterator[Finding]:
    """Masks of all ranks: pinned too tightly, on top of each other, or not at all."""
    ranks = [Pinned(facts.system.host, frozenset(facts.cores.mask), threads_of(facts)) for facts in job]
    slow, same = too_few_cores(ranks), crowded(ranks, job[0].cores.node_cores)
    if slow is not None:
        yield warn("cores.threads", slow, "set OMP_NUM_THREADS to the cores of a rank, or give it more cores")
    if same is not None:
        yield fail("cores.same", same, "--cpus-per-task=N and SRUN_CPUS_PER_TASK, or mpiexec --bind-to none")
        return
    overlap, threads = _partly_shared(ranks), _too_many_threads(ranks)
    if overlap is not None:
        yield warn("cores.overlap", overlap, "give each rank cores of its own: srun --cpu-bind=cores -c N")
    if threads is not None and slow is None:
        yield warn("cores.oversubscribed", threads, "ranks x OMP_NUM_THREADS = cores of a node: fewer of either")


def threads_of(facts: RankFacts) -> int:
    """Threads that torch would take: OMP_NUM_THREADS, else what mpidp's trainer takes, which fits."""
    asked = facts.environment.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else 1


def ranges(cores: Sequence[int]) -> str:
    """Numbers of cores as a short list, such as "0-3,8"."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _partly_shared(ranks: Sequence[Pinned]) -> str | None:
    for second, b in enumerate(ranks):
        for first, a in enumerate(ranks[:second]):
            if a.host == b.host and a.cores != b.cores and a.cores & b.cores:
                common = ranges(sorted(a.cores & b.cores))
                return f"ranks {first} and {second} on {a.host} have masks that overlap in cores {common}"
    return None


def _too_many_threads(ranks: Sequence[Pinned]) -> str | None:
    for host in dict.fromkeys(pinned.host for pinned in ranks):
        here = [pinned for pinned in ranks if pinned.host == host]
        threads, cores = sum(p.threads for p in here), len(frozenset[int]().union(*(p.cores for p in here)))
        if threads > cores:
            return f"{len(here)} ranks on {host} have {threads} threads together and {cores} cores"
    return None


def check_memory(facts: RankFacts) -> Iterator[Finding]:
    """What is left of memory and /dev/shm, what may be locked, and how many files may be open."""
    memory, fabrics = facts.memory, facts.system.fabrics
    left = "not said" if memory.available is None else size_text(memory.available)
    limit = "not said" if memory.limit is None else size_text(memory.limit)
    locked = "unlimited" if memory.locked is None else size_text(memory.locked)
    yield ok("memory", f"{left} available, limit {limit}; locked memory {locked}; {memory.open_files:,} open files")
    yield _shared_memory(facts)
    if fabrics and memory.locked is not None and memory.locked < LITTLE_LOCKED_BYTES:
        yield warn(
            "memory.locked",
            f"only {locked} may be locked, and the network ({', '.join(fabrics)}) needs locked memory: 'ibv_reg_mr "
            "failed: Cannot allocate memory'",
            "ulimit -l unlimited; in Slurm LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK",
        )
    if memory.open_files < FEW_OPEN_FILES:
        text = f"only {memory.open_files} files may be open at once"
        yield warn("memory.open_files", text, f"ulimit -n {FEW_OPEN_FILES}")


def _shared_memory(facts: RankFacts) -> Finding:
    free, size = facts.memory.shm_free, facts.memory.shm_size
    in_container = bool(facts.system.container)
    fix = "start the container with --shm-size=8g" if in_container else "remove old files there, or ask to enlarge it"
    if free is None or size is None:
        return warn("memory.shm", "there is no /dev/shm: MPI cannot send messages through the memory of a node", fix)
    text = f"/dev/shm has {size_text(free)} left of {size_text(size)}"
    if free >= SMALL_SHM_BYTES:
        return ok("memory.shm", text)
    return warn(
        "memory.shm",
        f"{text}: MPI's own messages between ranks of a node go through it, and Open MPI says 'not enough space "
        "for the shared-memory backing file' where they do not fit",
        fix + "; for Open MPI alone: OMPI_MCA_btl_sm_backing_directory=/tmp",
    )


def check_gpus(facts: RankFacts) -> Iterator[Finding]:
    """The GPUs that one rank sees."""
    gpus = facts.gpus
    names = [f"{name}={facts.environment[name]}" for name in CHOOSING if name in facts.environment]
    chosen = f" ({', '.join(names)})" if names else ""
    if not gpus.seen and (gpus.error or gpus.device_files):
        yield warn(
            "gpus",
            f"{gpus.device_files} GPU device files, but none is seen by this process{chosen}: "
            f"{gpus.error or 'no driver library, or not bound to this task'}",
            "ask for GPUs (--gpus-per-node), in a container run it with --nv or --rocm, and look at nvidia-smi",
        )
        return
    if not gpus.seen:
        yield ok("gpus", f"none{chosen}: training runs on the CPU")
        return
    listed = "; ".join(f"{gpu.index}: {gpu.name} {gpu.uuid} {gpu.pci}" for gpu in gpus.seen)
    yield ok("gpus", f"{len(gpus.seen)} seen{chosen}: {listed}")
    if gpus.links:
        yield ok("gpus.links", ", ".join(f"{pair} by {link}" for pair, link in gpus.links.items()))
    torch = facts.versions.packages.get("torch")
    if torch and not {"cuda": facts.versions.torch_cuda, "hip": facts.versions.torch_hip}.get(gpus.driver):
        yield fail(
            "gpus.torch",
            f"the driver ({gpus.driver}) shows GPUs; torch {torch} is not built for it",
            "install torch for this driver (see pytorch.org); training would run on the CPU",
        )


def check_shared(job: Sequence[RankFacts]) -> Iterator[Finding]:
    """Which rank takes which GPU, and what is wrong with that."""
    taken = [_taken(facts, job[:rank]) for rank, facts in enumerate(job)]
    if not any(taken):
        return
    yield ok("gpus.ranks", "; ".join(_line(rank, gpu, job[rank]) for rank, gpu in enumerate(taken)))
    yield from _two_on_one(job, taken)
    if None in taken:
        where = f"rank {taken.index(None)} on {job[taken.index(None)].system.host}"
        fix = "look at CUDA_VISIBLE_DEVICES and nvidia-smi on that node"
        yield fail("gpus.some", f"{where} sees no GPU, others do", fix)
    # Ranks of a node that each see one GPU cannot reach each other's memory.
    hosts = [facts.system.host for facts in job if len(facts.gpus.seen) == 1]
    if len(set(hosts)) < len(hosts):
        name = next((name for name in BOUND if any(name in facts.environment for facts in job)), "")
        yield warn(
            "gpus.bound",
            f"each rank sees one GPU only{f' ({name} is set)' if name else ''}: MPI cannot open the memory of its "
            "neighbour's ('The call to cuIpcOpenMemHandle failed')",
            "use --gpus-per-node=N instead of --gpus-per-task or --gpu-bind; mpidp gives each rank its own",
        )
    yield from _far(job, taken)


def _taken(facts: RankFacts, before: Sequence[RankFacts]) -> Gpu | None:
    """The GPU that mpidp gives this rank: by its number on the node, as `mpidp.world.device.choose_index`."""
    seen = facts.gpus.seen
    local_rank = sum(other.system.host == facts.system.host for other in before)
    return seen[local_rank % len(seen)] if seen else None


def _line(rank: int, gpu: Gpu | None, facts: RankFacts) -> str:
    return f"rank {rank} on {facts.system.host}: {f'{gpu.index} {gpu.uuid} {gpu.pci}' if gpu else 'none'}"


def _two_on_one(job: Sequence[RankFacts], taken: Sequence[Gpu | None]) -> Iterator[Finding]:
    holder: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(taken):
        host = job[rank].system.host
        first = holder.setdefault((host, gpu.uuid), rank) if gpu else rank
        if gpu and first != rank:
            text = f"ranks {first} and {rank} on {host} both take the GPU {gpu.uuid}"
            if job[rank].environment.get("MPIDP_SHARE_GPU") == "1":
                yield warn("gpus.shared", text + ", as MPIDP_SHARE_GPU=1 allows", "one rank a GPU is faster")
            else:
                yield fail("gpus.shared", text, "--ntasks-per-node equal to --gpus-per-node, or MPIDP_SHARE_GPU=1")
            return


def _far(job: Sequence[RankFacts], taken: Sequence[Gpu | None]) -> Iterator[Finding]:
    for rank, gpu in enumerate(taken):
        mask = frozenset(job[rank].cores.mask)
        if gpu and gpu.cores and not mask & frozenset(gpu.cores):
            yield warn(
                "gpus.far",
                f"rank {rank} on {job[rank].system.host} runs on cores {ranges(sorted(mask))}, its GPU {gpu.pci} is "
                f"beside cores {ranges(gpu.cores)}: every copy goes from one socket to the other",
                "srun --cpu-bind=map_cpu or mask_cpu in the order of the GPUs, or --gpu-bind=closest with all visible",
            )
            return


def check_data(facts: RankFacts) -> Iterator[Finding]:
    """HDF5, its filters, and the data file."""
    if facts.hdf5 is not None:
        yield from _library(facts.hdf5, facts.environment.get("HDF5_PLUGIN_PATH", ""))
    elif facts.hdf5_error:
        yield fail("hdf5", f"h5py cannot be used: {facts.hdf5_error}", "pip install h5py, without another one")
    if facts.file is not None:
        yield from _file(facts.file, facts.hdf5)


def _library(hdf5: HDF5Library, plugin_path: str) -> Iterator[Finding]:
    there = [name for name, is_there in hdf5.filters.items() if is_there]
    missing = [name for name, is_there in hdf5.filters.items() if not is_there]
    mpi = "; built with MPI, which mpidp does not need" if hdf5.has_mpi else ""
    more = f"; HDF5_PLUGIN_PATH {plugin_path}" if plugin_path else ""
    yield ok("hdf5", f"HDF5 {hdf5.hdf5}, h5py {hdf5.h5py}; filters {', '.join(there)}{mpi}{more}")
    if missing and not hdf5.packages.get("hdf5plugin"):
        text = f"files with the filters {', '.join(missing)} cannot be read ('required filter is not registered')"
        yield ok("hdf5.filters", f"{text}; where you have such files: pip install hdf5plugin")
    if not hdf5.packages.get("imagecodecs"):
        text = "imagecodecs is not installed: chunks are decoded more slowly; pip install imagecodecs"
        yield ok("hdf5.codecs", text)


def _file(file: DataFile, hdf5: HDF5Library | None) -> Iterator[Finding]:
    if file.error:
        fix = "give the path as compute nodes see it; a container needs --bind"
        yield fail("data", f"{file.path}: {file.error}", fix)
        return
    where = f"{file.kind or 'unknown'} ({'network' if file.is_network else 'this node'})"
    yield ok("data", f"{file.path}: {size_text(file.num_bytes)} on {where}, {size_text(file.free_bytes)} free")
    if file.lock_error:
        yield ok(
            "data.locks",
            f"the file system has no locks ({file.lock_error}); mpidp reads without them. Other programs need "
            "HDF5_USE_FILE_LOCKING=FALSE",
        )
    if hdf5 is not None and hdf5.file_error:
        yield fail(
            "data.hdf5",
            f"{file.path}: HDF5 cannot open it: {hdf5.file_error}",
            f"h5ls {file.path}; copy it again if it is truncated; mpidp data verify says more",
        )
