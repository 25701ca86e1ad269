"""A module or tensor on each rank in, one rank's values on every rank out."""

import torch
from torch import Tensor, nn

from mpidp.reduce.exchange import pieces
from mpidp.world.world import World


def broadcast_module(module: nn.Module, world: World) -> None:
    """Gives parameters and buffers of every rank the values of rank 0, bit for bit, in place. Collective."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast_tensor(tensor, world)


def broadcast_tensor(tensor: Tensor, world: World, root: int = 0) -> None:
    """The root's bits in a tensor of any dtype and device, in place. Collective.

    It goes through host memory: it happens once, and works with every MPI library.
    """
    host = tensor.detach().to("cpu", copy=True).contiguous()
    flat = host.view(-1).view(torch.uint8) if host.numel() else host.view(torch.uint8)
    for piece in pieces(flat.numel(), 1):
        world.comm.Bcast(flat[piece].numpy(), root=root)
    if world.rank != root:
        tensor.copy_(host)
