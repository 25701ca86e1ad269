"""A World enters, torch's own communication over Gloo leaves: what benchmarks measure this package against.

The only place that uses torch.distributed; nothing of a training run comes here.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch's types leave it out
from torch.nn.parallel import DistributedDataParallel

from mpidp.errors import LaunchError
from mpidp.world.world import World

TIMEOUT = timedelta(seconds=300)
LOOPBACK = "127.0.0.1"


@contextmanager
def gloo(world: World) -> Iterator[None]:
    """A block in which torch.distributed's default group is Gloo over all ranks. Entering is collective.

    Gloo chooses its network interface itself; GLOO_SOCKET_IFNAME overrides it.

    Raises:
        LaunchError: several nodes, and rank 0's address cannot be told.
    """
    address = world.call_on_root(lambda: LOOPBACK if world.num_nodes == 1 else root_address(world.host, os.environ))
    torch.distributed.init_process_group(
        "gloo", store=_store(world, address), rank=world.rank, world_size=world.size, timeout=TIMEOUT
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def gloo_sum(tensor: Tensor) -> None:
    """Replaces a tensor by its sum over ranks. Collective, inside `gloo`."""
    torch.distributed.all_reduce(tensor)


def ddp(module: nn.Module, world: World) -> nn.Module:
    """The module in torch's DistributedDataParallel with its defaults. Collective, inside `gloo`."""
    return DistributedDataParallel(module, device_ids=[world.device] if world.device.type == "cuda" else None)


def root_address(host: str, environment: Mapping[str, str]) -> str:
    """Where other nodes reach this host, which is rank 0's: MASTER_ADDR, else what its name stands for.

    Raises:
        LaunchError: the name stands for nothing, or for the host's own loopback as some distributions have it.
    """
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        found = f"its name cannot be resolved ({error})"
    else:
        if not ip_address(address).is_loopback:
            return address
        found = f"there its name stands for {address}"
    raise LaunchError(
        f"torch.distributed on several nodes needs the address of rank 0's node {host}, and {found}: "
        f"set MASTER_ADDR to an address of {host} that all nodes reach."
    )


def _store(world: World, address: str) -> TCPStore:
    """The key-value store through which Gloo's ranks find each other, served by rank 0 on a free port."""

    def connect(port: int) -> TCPStore:
        is_master = world.rank == 0
        return TCPStore(address, port, world.size, is_master, TIMEOUT, wait_for_workers=False)

    store = connect(0) if world.rank == 0 else None
    port = world.broadcast(None if store is None else store.port)
    return connect(port) if store is None else store
