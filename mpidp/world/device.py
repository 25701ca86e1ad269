"""The device of this rank, and the test that MPI can be given its memory.

A library that is not CUDA-aware crashes on a device pointer or, worse, copies wrong values. What it reports of itself
is only a hint; the result of an Allreduce on device memory decides. That runs in a child process (`python -m
mpidp.world.device DEVICE`), whose crash does no harm.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mpidp.errors import LaunchError
from mpidp.world.launch import without_launcher
from mpidp.world.mpi import MPI

PROBE_TIMEOUT_S = 60.0
OVERRIDE = "MPIDP_CUDA_AWARE"


def choose_index(local_rank: int, visible: int) -> int | None:
    """Index of this rank's GPU among those it sees; None means CPU. A single one was bound to it by the launcher."""
    return local_rank % visible if visible else None


def set_device(local_rank: int) -> torch.device:
    """This rank's device, made torch's current one so that nothing is allocated on GPU 0 by accident."""
    index = choose_index(local_rank, torch.cuda.device_count())
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_uuid(device: torch.device) -> str:
    """The GPU's UUID; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def shared_gpu(uuids: Sequence[str], host: str) -> LaunchError | None:
    """An error when two local ranks of this host hold one GPU. `uuids` is indexed by local rank, "" for a CPU."""
    holders = [[rank for rank, other in enumerate(uuids) if uuid and other == uuid] for uuid in uuids]
    first, second = next((ranks[:2] for ranks in holders if len(ranks) > 1), (None, None))
    if first is None:
        return None
    return LaunchError(
        f"local ranks {first} and {second} on {host} both use the GPU {uuids[first]}: {len(uuids)} ranks run there on "
        f"{len({uuid for uuid in uuids if uuid})} GPU(s). Start at most one rank a GPU (for example "
        f"`--ntasks-per-node` equal to `--gpus-per-node`), or allow it with mpidp.init(share_gpu=True) or "
        f"MPIDP_SHARE_GPU=1."
    )


@dataclass(frozen=True)
class Awareness:
    """Whether device pointers may be given to MPI, and why."""

    aware: bool
    reason: str


def decide(environment: Mapping[str, str], hint: bool | None, probe: Callable[[], str | None]) -> Awareness:
    """Decides whether MPI may be given device memory.

    Args:
        environment: `MPIDP_CUDA_AWARE=0` or `1` overrides everything.
        hint: what the library says of itself; None when it has no such query.
        probe: runs the test; returns None when it passed, else what went wrong. Not called when the hint is False.

    Raises:
        LaunchError: the override is neither 0 nor 1.
    """
    override = environment.get(OVERRIDE)
    if override is not None:
        if override not in ("0", "1"):
            raise LaunchError(f"{OVERRIDE}={override!r}: allowed are 0 (never give MPI device memory) and 1 (always).")
        return Awareness(override == "1", f"set by {OVERRIDE}={override}")
    if hint is False:
        return Awareness(False, "the MPI library says that it does not support device memory")
    failure = probe()
    if failure is None:
        return Awareness(True, "an Allreduce on device memory gave the right result in a child process")
    return Awareness(False, f"the test on device memory failed in a child process: {failure}")


def probe_in_child(device: str) -> str | None:
    """Runs `python -m mpidp.world.device DEVICE` as a world of its own; None when it passed, else what went wrong."""
    command = [sys.executable, "-m", "mpidp.world.device", device]
    environment = without_launcher(os.environ)
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    if result.returncode == 0:
        return None
    last_lines = " | ".join(result.stderr.strip().splitlines()[-2:])
    return f"exit code {result.returncode}: {last_lines or 'no message'}"


def main(device: torch.device) -> int:
    """Returns 0 when both results on the device are right."""
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    source = torch.arange(1 << 18, dtype=torch.float32, device=device)
    summed, received = torch.zeros_like(source), torch.zeros_like(source)
    _finish_kernels(device)
    MPI.COMM_WORLD.Allreduce(source, summed, op=MPI.SUM)
    MPI.COMM_WORLD.Sendrecv(source, dest=0, recvbuf=received, source=0)
    _finish_kernels(device)
    if torch.equal(source, summed) and torch.equal(source, received):
        return 0
    print("wrong values in device memory", file=sys.stderr)
    return 1


def _finish_kernels(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1])))
