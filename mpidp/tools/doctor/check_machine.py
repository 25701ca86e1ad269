"""Checks of nodes: containers, cores, memory, GPUs, HDF5 and the data file. Pure."""

from collections.abc import Sequence

from mpidp.hdf5.files.library import HDF5Library
from mpidp.tools.doctor.facts import DataFile, Gpu, Memory, RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok, warn
from mpidp.tools.doctor.machine import visible
from mpidp.tools.table import size_text
from mpidp.world.system import Pinned, crowded, too_few_cores

ATTACH_ADMIN_ONLY = 2  # of /proc/sys/kernel/yama/ptrace_scope


def check_node(facts: RankFacts) -> list[Finding]:
    """What the node and its container do to MPI."""
    system = facts.system
    place = f"in a container ({system.container})" if system.container else "in no container"
    fast = f"; fast network {', '.join(system.fabrics)}" if system.fabrics else ""
    return [ok("node", f"{system.host}, Linux {system.kernel}, {place}{fast}"), *_copies(facts)]


def _copies(facts: RankFacts) -> list[Finding]:
    system = facts.system
    is_blocked = bool(system.cross_memory) or (system.ptrace_scope or 0) >= ATTACH_ADMIN_ONLY
    if not is_blocked or facts.environment.get("OMPI_MCA_smsc") == "^cma":
        return []
    why = f"process_vm_readv: {system.cross_memory}" if system.cross_memory else f"ptrace_scope {system.ptrace_scope}"
    return [
        warn(
            "node.copies",
            f"processes may not copy from each other's memory ({why}): Open MPI stops with 'Read -1, expected N, "
            "errno = 1'",
            "docker run --cap-add=SYS_PTRACE; or OMPI_MCA_smsc=^cma (Open MPI 5), for Open MPI 4 "
            "OMPI_MCA_btl_vader_single_copy_mechanism=none",
        )
    ]


def check_cores(facts: RankFacts) -> list[Finding]:
    """The mask of one rank, and what limits it."""
    mask = facts.cores.mask
    threads = facts.environment.get("OMP_NUM_THREADS", "not set")
    findings = [
        ok("cores", f"{len(mask)} of {facts.cores.node_cores} cores ({ranges(mask)}); OMP_NUM_THREADS {threads}")
    ]
    quota = facts.cores.quota
    if quota is not None and quota < len(mask):
        findings.append(
            warn(
                "cores.quota",
                f"the control group pays for {quota:g} cores, the mask has {len(mask)}",
                f"set OMP_NUM_THREADS={max(1, int(quota))}, or give the container more (docker run --cpus)",
            )
        )
    wanted = facts.environment.get("SLURM_CPUS_PER_TASK", "")
    if facts.launch.launcher == "Slurm's srun" and wanted.isdecimal() and len(mask) < int(wanted):
        findings.append(
            warn(
                "cores.srun",
                f"the job has {wanted} CPUs a task, srun gave this one {len(mask)}: srun does not take it over",
                "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun",
            )
        )
    return findings


def check_sharing(job: Sequence[RankFacts]) -> list[Finding]:
    """Masks of all ranks: pinned too tightly, on top of each other, or not at all."""
    ranks = [Pinned(facts.system.host, frozenset(facts.cores.mask), threads_of(facts)) for facts in job]
    findings: list[Finding] = []
    slow = too_few_cores(ranks)
    if slow is not None:
        findings.append(
            warn("cores.threads", slow, "set OMP_NUM_THREADS to the cores of a rank, or give it more cores")
        )
    together = crowded(ranks, job[0].cores.node_cores)
    if together is not None:
        findings.append(
            fail("cores.same", together, "--cpus-per-task=N and SRUN_CPUS_PER_TASK, or mpiexec --bind-to none")
        )
    overlap = _partly_shared(ranks) if together is None else None
    if overlap is not None:
        findings.append(warn("cores.overlap", overlap, "give each rank cores of its own: srun --cpu-bind=cores -c N"))
    threads = _too_many_threads(ranks)
    if threads is not None and slow is None and together is None:
        findings.append(
            warn("cores.oversubscribed", threads, "ranks x OMP_NUM_THREADS = cores of a node: fewer of either")
        )
    return findings


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


# Docker gives 64 MiB. Gradients of a model with 20 million parameters, of four ranks, need five times as much.
SMALL_SHM_BYTES = 1 << 30
LITTLE_LOCKED_BYTES = 1 << 30
FEW_OPEN_FILES = 1024


def check_memory(facts: RankFacts) -> list[Finding]:
    """Limits that a job meets."""
    memory = facts.memory
    left = "not said" if memory.available is None else size_text(memory.available)
    limit = "not said" if memory.limit is None else size_text(memory.limit)
    locked = "unlimited" if memory.locked is None else size_text(memory.locked)
    return [
        ok("memory", f"{left} available, limit {limit}; locked memory {locked}; {memory.open_files:,} open files"),
        *_shared(memory, bool(facts.system.container)),
        *_locked(memory, facts.system.fabrics),
        *_open_files(memory),
    ]


def _shared(memory: Memory, in_container: bool) -> list[Finding]:
    fix = "start the container with --shm-size=8g" if in_container else "remove old files there, or ask to enlarge it"
    if memory.shm_free is None or memory.shm_size is None:
        return [warn("memory.shm", "there is no /dev/shm: MPI cannot send messages through the memory of a node", fix)]
    text = f"/dev/shm has {size_text(memory.shm_free)} left of {size_text(memory.shm_size)}"
    if memory.shm_free >= SMALL_SHM_BYTES:
        return [ok("memory.shm", text)]
    return [
        warn(
            "memory.shm",
            f"{text}: MPI's own messages between ranks of a node go through it, and Open MPI says 'not enough space "
            "for the shared-memory backing file' where they do not fit",
            fix + "; for Open MPI alone: OMPI_MCA_btl_sm_backing_directory=/tmp",
        )
    ]


def _locked(memory: Memory, fabrics: tuple[str, ...]) -> list[Finding]:
    if not fabrics or memory.locked is None or memory.locked >= LITTLE_LOCKED_BYTES:
        return []
    return [
        warn(
            "memory.locked",
            f"only {size_text(memory.locked)} may be locked, and the network ({', '.join(fabrics)}) needs locked "
            "memory: 'ibv_reg_mr failed: Cannot allocate memory'",
            "ulimit -l unlimited; in Slurm LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK",
        )
    ]


def _open_files(memory: Memory) -> list[Finding]:
    if memory.open_files >= FEW_OPEN_FILES:
        return []
    return [
        warn("memory.open_files", f"only {memory.open_files} files may be open at once", f"ulimit -n {FEW_OPEN_FILES}")
    ]


BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK")


def check_gpus(facts: RankFacts) -> list[Finding]:
    """What one rank sees."""
    gpus, names = facts.gpus, visible(facts.environment)
    chosen = f" ({names})" if names else ""
    if not gpus.seen:
        return [_none_seen(facts, chosen)]
    built = {"cuda": facts.versions.torch_cuda, "hip": facts.versions.torch_hip}.get(gpus.driver)
    listed = "; ".join(f"{gpu.index}: {gpu.name} {gpu.uuid} {gpu.pci}" for gpu in gpus.seen)
    findings = [ok("gpus", f"{len(gpus.seen)} seen{chosen}: {listed}")]
    if gpus.links:
        findings.append(ok("gpus.links", ", ".join(f"{pair} by {link}" for pair, link in gpus.links.items())))
    if not built and facts.versions.packages.get("torch"):
        findings.append(
            fail(
                "gpus.torch",
                f"the driver ({gpus.driver}) shows GPUs; torch {facts.versions.packages['torch']} is not built for it",
                "install torch for this driver (see pytorch.org); training would run on the CPU",
            )
        )
    return findings


def check_shared(job: Sequence[RankFacts]) -> list[Finding]:
    """Which rank takes which GPU, and whether two take one."""
    taken = [_taken(facts, job[:rank]) for rank, facts in enumerate(job)]
    if not any(taken):
        return []
    findings = [ok("gpus.ranks", "; ".join(_line(rank, gpu, job[rank]) for rank, gpu in enumerate(taken)))]
    for check in (_two_on_one, _some_without, _bound, _far):
        finding = check(job, taken)
        if finding is not None:
            findings.append(finding)
    return findings


Taken = Sequence[Gpu | None]


def _none_seen(facts: RankFacts, chosen: str) -> Finding:
    gpus = facts.gpus
    if gpus.error or gpus.device_files:
        return warn(
            "gpus",
            f"{gpus.device_files} GPU device files, but none is seen by this process{chosen}: "
            f"{gpus.error or 'no driver library, or not bound to this task'}",
            "ask for GPUs (--gpus-per-node), in a container run it with --nv or --rocm, and look at nvidia-smi",
        )
    return ok("gpus", f"none{chosen}: training runs on the CPU")


def _taken(facts: RankFacts, before: Sequence[RankFacts]) -> Gpu | None:
    """The GPU that mpidp gives this rank: by its number on the node, as `mpidp.world.device.choose_index`."""
    seen = facts.gpus.seen
    local_rank = sum(other.system.host == facts.system.host for other in before)
    return seen[local_rank % len(seen)] if seen else None


def _line(rank: int, gpu: Gpu | None, facts: RankFacts) -> str:
    return f"rank {rank} on {facts.system.host}: {f'{gpu.index} {gpu.uuid} {gpu.pci}' if gpu else 'none'}"


def _two_on_one(job: Sequence[RankFacts], taken: Taken) -> Finding | None:
    holder: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(taken):
        if gpu is None:
            continue
        first = holder.setdefault((job[rank].system.host, gpu.uuid), rank)
        if first != rank:
            text = f"ranks {first} and {rank} on {job[rank].system.host} both take the GPU {gpu.uuid}"
            if job[rank].environment.get("MPIDP_SHARE_GPU") == "1":
                return warn("gpus.shared", text + ", as MPIDP_SHARE_GPU=1 allows", "one rank a GPU is faster")
            return fail("gpus.shared", text, "--ntasks-per-node equal to --gpus-per-node, or MPIDP_SHARE_GPU=1")
    return None


def _some_without(job: Sequence[RankFacts], taken: Taken) -> Finding | None:
    without = [rank for rank, gpu in enumerate(taken) if gpu is None]
    if not without:
        return None
    where = f"rank {without[0]} on {job[without[0]].system.host}"
    return fail(
        "gpus.some", f"{where} sees no GPU, others do", "look at CUDA_VISIBLE_DEVICES and nvidia-smi on that node"
    )


def _bound(job: Sequence[RankFacts], taken: Taken) -> Finding | None:
    """One GPU seen by each of several ranks of a node: they cannot reach each other's memory."""
    hosts = [facts.system.host for facts in job if len(facts.gpus.seen) == 1]
    if len(set(hosts)) == len(hosts):
        return None
    names = next((name for name in BOUND if any(name in facts.environment for facts in job)), "")
    return warn(
        "gpus.bound",
        f"each rank sees one GPU only{f' ({names} is set)' if names else ''}: MPI cannot open the memory of its "
        "neighbour's ('The call to cuIpcOpenMemHandle failed')",
        "use --gpus-per-node=N instead of --gpus-per-task or --gpu-bind; mpidp gives each rank its own",
    )


def _far(job: Sequence[RankFacts], taken: Taken) -> Finding | None:
    for rank, gpu in enumerate(taken):
        mask = frozenset(job[rank].cores.mask)
        if gpu and gpu.cores and not mask & frozenset(gpu.cores):
            return warn(
                "gpus.far",
                f"rank {rank} on {job[rank].system.host} runs on cores {ranges(sorted(mask))}, its GPU {gpu.pci} is "
                f"beside cores {ranges(gpu.cores)}: every copy goes from one socket to the other",
                "srun --cpu-bind=map_cpu or mask_cpu in the order of the GPUs, or --gpu-bind=closest with all visible",
            )
    return None


def check_data(facts: RankFacts) -> list[Finding]:
    """The library, its filters, and the file."""
    findings: list[Finding] = []
    if facts.hdf5 is not None:
        findings += _library(facts.hdf5, facts.environment.get("HDF5_PLUGIN_PATH", ""))
    elif facts.hdf5_error:
        findings.append(
            fail("hdf5", f"h5py cannot be used: {facts.hdf5_error}", "pip install h5py, without another one")
        )
    if facts.file is not None:
        findings += _file(facts.file, facts.hdf5)
    return findings


def _library(hdf5: HDF5Library, plugin_path: str) -> list[Finding]:
    there = [name for name, is_there in hdf5.filters.items() if is_there]
    missing = [name for name, is_there in hdf5.filters.items() if not is_there]
    mpi = "; built with MPI, which mpidp does not need" if hdf5.has_mpi else ""
    more = f"; HDF5_PLUGIN_PATH {plugin_path}" if plugin_path else ""
    findings = [ok("hdf5", f"HDF5 {hdf5.hdf5}, h5py {hdf5.h5py}; filters {', '.join(there)}{mpi}{more}")]
    if missing and not hdf5.packages.get("hdf5plugin"):
        text = f"files with the filters {', '.join(missing)} cannot be read ('required filter is not registered')"
        findings.append(ok("hdf5.filters", f"{text}; where you have such files: pip install hdf5plugin"))
    if not hdf5.packages.get("imagecodecs"):
        findings.append(
            ok("hdf5.codecs", "imagecodecs is not there: chunks are decoded by slower ways; pip install imagecodecs")
        )
    return findings


def _file(file: DataFile, hdf5: HDF5Library | None) -> list[Finding]:
    if file.error:
        return [
            fail(
                "data", f"{file.path}: {file.error}", "give the path as compute nodes see it; a container needs --bind"
            )
        ]
    where = f"{file.kind or 'unknown'} ({'network' if file.is_network else 'this node'})"
    findings = [ok("data", f"{file.path}: {size_text(file.num_bytes)} on {where}, {size_text(file.free_bytes)} free")]
    if file.lock_error:
        findings.append(
            ok(
                "data.locks",
                f"the file system gives no locks ({file.lock_error}); mpidp reads without them. Other programs need "
                "HDF5_USE_FILE_LOCKING=FALSE",
            )
        )
    if hdf5 is not None and hdf5.file_error:
        findings.append(
            fail(
                "data.hdf5",
                f"{file.path}: HDF5 cannot open it: {hdf5.file_error}",
                f"h5ls {file.path}; copy it again if it is truncated; mpidp data verify says more",
            )
        )
    return findings
