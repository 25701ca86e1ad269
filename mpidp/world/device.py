"""Local rank and visible GPUs in, this rank's device out, chosen before anything allocates."""

from collections.abc import Sequence

import torch

from mpidp.errors import LaunchError


def choose_index(local_rank: int, visible: int) -> int | None:
    """Index of this rank's GPU among those it sees; None means CPU.

    One visible GPU means that the launcher bound it to this rank: index 0, whatever the local rank.
    """
    if visible == 0:
        return None
    return local_rank % visible


def find_shared(uuids: Sequence[str]) -> tuple[int, int] | None:
    """The first two local ranks that hold the same GPU (same UUID), or None. `uuids` is indexed by local rank."""
    first_holder: dict[str, int] = {}
    for local_rank, uuid in enumerate(uuids):
        if not uuid:
            continue
        if uuid in first_holder:
            return first_holder[uuid], local_rank
        first_holder[uuid] = local_rank
    return None


def set_device(local_rank: int) -> torch.device:
    """This rank's device, made torch's current one so that nothing is allocated on GPU 0 by accident."""
    index = choose_index(local_rank, torch.cuda.device_count())
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_uuid(device: torch.device) -> str:
    """The GPU's UUID; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_not_shared(uuids: Sequence[str], host: str) -> None:
    """Raises LaunchError when two local ranks of this host hold one GPU. `uuids` is indexed by local rank."""
    shared = find_shared(uuids)
    if shared is None:
        return
    first, second = shared
    raise LaunchError(
        f"local ranks {first} and {second} on {host} both use the GPU {uuids[first]}: {len(uuids)} ranks run there on "
        f"{len({uuid for uuid in uuids if uuid})} GPU(s). Start at most one rank a GPU (for example "
        f"`--ntasks-per-node` equal to `--gpus-per-node`), or allow it with mpidp.init(share_gpu=True) or "
        f"MPIDP_SHARE_GPU=1."
    )
