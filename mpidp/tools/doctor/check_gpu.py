"""GPUs enter, of one rank and of all; findings leave: none seen, bound a task, shared, far from the cores. Pure."""

from collections.abc import Sequence

from mpidp.tools.doctor.check_cores import ranges
from mpidp.tools.doctor.facts import Gpu, RankFacts
from mpidp.tools.doctor.facts_gpu import visible
from mpidp.tools.doctor.finding import Finding, fail, ok, warn

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
