"""An optimizer in; an error out where its work cannot be divided into shards. Needs no MPI."""

import torch

from mpidp.errors import MpidpError
from mpidp.train.sharding.shard import is_dense

# Of torch.optim, those that do with an element what they would do with it in any other tensor.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def check_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose step may mix elements of a parameter, or whose parameters cannot be cut.

    Raises:
        MpidpError: what is in the way, and what to do about it.
    """
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
    if not is_known and not getattr(kind, "elementwise", False):
        raise MpidpError(
            f"{kind.__qualname__} cannot be sharded: its step may mix the elements of a parameter. Use one of "
            f"{', '.join(ELEMENTWISE)}; a class of your own promises the contrary by an attribute elementwise = True"
        )
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise MpidpError("a scheduler holds the optimizer to be sharded: make it afterwards, over the sharded one")
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if not is_dense(parameter):
            raise MpidpError(
                f"parameter {number} of shape {tuple(parameter.shape)} does not lie densely in memory (strides "
                f"{tuple(parameter.stride()) if parameter.layout is torch.strided else parameter.layout}), and cannot "
                f"be sharded: make it contiguous"
            )
