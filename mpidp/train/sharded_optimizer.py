"""The class `ShardedOptimizer`: an optimizer of which each rank keeps only its share of the state.

This is the first stage of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020), for gradients that are the mean over ranks already: each rank brings its shard of the parameters up to
date, then all gather the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from mpidp.errors import SHARED_MARK, LaunchError, MpidpError
from mpidp.train.agreement import check_same
from mpidp.train.sharded_gather import Gather, collect, make_channel
from mpidp.train.sharded_state import (
    Part,
    Run,
    State,
    by_parameter,
    check_divisible,
    cut,
    flat,
    flat_like,
    full_state_dict,
    holders,
    join,
    run_of,
    shards,
)
from mpidp.world import mpi
from mpidp.world.world import World


class Shard:
    """The runs that this rank holds, as parameters of an optimizer of their own. No MPI.

    Attributes:
        inner: the optimizer; its parameters are views of the model's.
        runs: the runs that it holds.
        flats: the memory of each parameter of the model, in one dimension.

    Args:
        optimizer: over the model's parameters; it gets the runs in their place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.inner = optimizer
        self.runs: list[Run] = []
        self._parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        # Which parameters, by number, belong to each group.
        self._ranges: list[range] = []
        for group in optimizer.param_groups:
            group.pop("param_names", None)  # of whole parameters
            first = self._ranges[-1].stop if self._ranges else 0
            self._ranges.append(range(first, first + len(group["params"])))
        self._slices: list[Tensor] = []
        self.flats = [flat(parameter.detach()) for parameter in self._parameters]
        self._strides = [parameter.stride() for parameter in self._parameters]

    def hold(self, runs: Sequence[Run], states: Sequence[State], *, cast: bool = True) -> None:
        """Sets the runs, with the optimizer's state of each ({} where there is none yet).

        Args:
            runs: in any order.
            states: as many.
            cast: convert tensors of the state to the dtype of the parameter, as torch does when it loads a state.
        """
        self.runs = sorted(runs)
        self._slices = [self._slice(run) for run in self.runs]
        for numbers, group in zip(self._ranges, self.inner.param_groups, strict=True):
            held = zip(self.runs, self._slices, strict=True)
            group["params"] = [part for run, part in held if run.parameter in numbers]
        self.inner.state.clear()
        of_run = dict(zip(runs, states, strict=True))
        packed = self.inner.state_dict()
        packed["state"] = {place: of_run[run] for place, run in enumerate(self.runs) if of_run[run]}
        self.inner.load_state_dict(packed)  # moves each tensor to the device where torch keeps it
        if not cast:
            for run, part in zip(self.runs, self._slices, strict=True):
                _keep_dtypes(self.inner.state.get(part, {}), of_run[run])

    def _slice(self, run: Run) -> Tensor:
        part = self.flats[run.parameter][run.start : run.stop]
        return part.requires_grad_() if part.is_floating_point() or part.is_complex() else part

    def parts(self) -> list[Part]:
        """Each run with its state; not copies."""
        return [(run, dict(self.inner.state.get(part, {}))) for run, part in zip(self.runs, self._slices, strict=True)]

    def follow(self) -> bool:
        """Moves the runs to the new memory of parameters, as after `module.to(...)`; returns whether there was any.

        Raises:
            MpidpError: the order of elements in memory has changed, or it is not dense.
        """
        if all(lay.data_ptr() == p.data_ptr() for lay, p in zip(self.flats, self._parameters, strict=True)):
            return False
        for number, (strides, parameter) in enumerate(zip(self._strides, self._parameters, strict=True)):
            if parameter.stride() != strides:
                raise MpidpError(
                    f"parameter {number} of shape {tuple(parameter.shape)} had strides {strides} when its optimizer "
                    f"was sharded, and has {parameter.stride()} now: change memory formats before"
                )
        self.flats = [flat(parameter.detach()) for parameter in self._parameters]
        for run, part in zip(self.runs, self._slices, strict=True):
            part.data = self.flats[run.parameter][run.start : run.stop]
        return True

    def step(self) -> None:
        """Steps the runs by the model's gradients; those without a gradient stay."""
        for run, part in zip(self.runs, self._slices, strict=True):
            parameter = self._parameters[run.parameter]
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise MpidpError(f"parameter {run.parameter} has a sparse gradient: its optimizer cannot be sharded")
            part.grad = flat_like(parameter.grad.detach(), parameter)[run.start : run.stop]
        self.inner.step()
        for part in self._slices:
            part.grad = None


def _keep_dtypes(loaded: State, given: State) -> None:
    """Some optimizers keep float32 state for 16-bit parameters; torch rounds it when it loads it."""
    for name, value in given.items():
        if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
            loaded[name] = value.to(loaded[name].device)


log = logging.getLogger("mpidp.rank")


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer that keeps only a share of its state on each rank (ZeRO-1). Construction is collective.

        model = mpidp.DataParallel(model, world)
        optimizer = mpidp.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), world)

    It steps as the given optimizer would; clipping, GradScaler and schedulers work as with any optimizer. Gradients
    must be equal on all ranks, as `DataParallel` leaves them. The given optimizer belongs to this one from then on,
    with its state, and must not be used otherwise. It may be of a class of your own if it updates each element of a
    parameter independently of the others; the class says so by an attribute `elementwise = True`.

    Args:
        optimizer: over the same parameters on all ranks; not one that mixes elements (LBFGS, Muon, Adafactor) or
            expects sparse gradients.
        world: the ranks.
        copies: on how many ranks each part of the state is kept: 1, or 2, so that it outlives the death of a rank
            (`mpidp.Elastic`), on another node where possible. The second is computed, not sent.

    Raises:
        ValueError: another number of copies.
        MpidpError: an optimizer or a parameter that cannot be cut into shards.
        MismatchError: the ranks' parameters or options differ.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, *, copies: int = 1):
        if copies not in (1, 2):
            raise ValueError(f"copies = {copies}: give 1, or 2 to keep every part of the state on two ranks")
        self.world, self.copies = world, copies
        self._is_made = False
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self._is_made = True
        for own, group in zip(self.param_groups, optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        self._parameters: list[nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        self._numels = [parameter.numel() for parameter in self._parameters]
        with world.raise_on_all_ranks("sharding the optimizer"):
            check_divisible(optimizer)
        check_same(world, [f"copies={copies}", *_describe(optimizer)], "the sharded optimizers")
        whole = [dict(optimizer.state.get(parameter, {})) for parameter in self._parameters]
        self._shard = Shard(optimizer)
        self._deal()
        with world.raise_on_all_ranks("sharding the optimizer"):
            self._shard.hold(self._mine, [self._cut(whole, run) for run in self._mine], cast=False)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The plain optimizer over this rank's shard of the parameters."""
        return self._shard.inner

    @property
    def runs(self) -> list[Run]:
        """The runs of elements that this rank holds."""
        return list(self._mine)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Steps this rank's shard of the parameters and gathers the others'. Collective.

        If a rank dies in this call and the others go on, it returns with the step taken, but parameters of other shards
        not updated: the next collective call raises, and `Elastic.restore` restores them. So with `Elastic`, read the
        parameters (for an average of them, or a copy to be saved) only after another collective call.

        Args:
            closure: computes the loss again, as in torch; called once.

        Returns:
            The loss of `closure`; None without one.

        Raises:
            MpidpError: the memory layout of a parameter has changed; a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share_options()
        if self._shard.follow():
            self._aim()
        self._shard.step()
        self._take_options()
        try:
            self._gather()
        except Exception as error:
            if not mpi.is_survived(error):
                raise
            log.info("a rank was lost while parameters were gathered: %s", error)
            mpi.revoke_all()  # no other rank may wait for this one either
        return loss

    def held_parts(self) -> list[Part]:
        """The runs that this rank holds, with their state; not copies."""
        return self._shard.parts()

    def collect_parts(self, held: Sequence[Part]) -> None:
        """Collects this rank's shard, state and parameters, from what the ranks that are left held before. Collective.

        Args:
            held: `held_parts()` of this rank's former optimizer. The parameters have this rank's values, which are
                up to date in these runs only.

        Raises:
            LaunchError: on all ranks, a part of the state was on lost ranks only.
        """
        try:
            states = collect(self.world.comm, self._numels, held, self._mine, self._shard.flats)
        except LookupError as error:
            raise _lost(error.args[0], self.copies) from None
        self._shard.hold(self._mine, states, cast=False)

    def full_state_dict(self, rank: int = 0) -> dict[str, Any]:
        """The `state_dict` of the plain optimizer, in host memory, on one rank; {} on the others. Collective."""
        whole = [Run(number, 0, numel) for number, numel in enumerate(self._numels) if numel]
        wanted = whole if self.world.rank == rank else []
        states = collect(self.world.comm, self._numels, self._shard.parts(), wanted)
        if self.world.rank != rank:
            return {}
        parts = list(zip(wanted, states, strict=True))
        return full_state_dict(self.groups_state_dict(), self._parameters, parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's `state_dict`, if there is one rank only.

        Raises:
            MpidpError: there are several ranks, none of which has the whole state; use `full_state_dict`.
        """
        if self.world.size > 1:
            raise MpidpError(
                f"the optimizer's state is spread over {self.world.size} ranks: call full_state_dict() on all of them, "
                f"which returns the plain state_dict on rank 0"
            )
        return self.full_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's share of the `state_dict` of a plain optimizer. Not collective; call it on every rank."""
        self.load_groups_state_dict(state_dict["param_groups"])
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        whole = [state_dict["state"].get(name, {}) for name in names]
        self._shard.hold(self._mine, [self._cut(whole, run) for run in self._mine])

    def groups_state_dict(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups, without state; the same on all ranks."""
        groups: list[dict[str, Any]] = super().state_dict()["param_groups"]
        return groups

    def load_groups_state_dict(self, groups: list[dict[str, Any]]) -> None:
        """Loads the options of `groups_state_dict()`, but no state. Not collective."""
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._share_options()  # by which torch decides where a state is to lie

    def own_parts(self) -> list[Part]:
        """Return the runs of which this rank is the first holder, with their state: each element on one rank."""
        own = set(self._lists[self.world.rank])
        return [part for part in self._shard.parts() if part[0] in own]

    def load_parts(self, parts: Iterable[Part]) -> None:
        """Loads what this rank holds from parts that together cover it, however they are split."""
        found = by_parameter(parts, run_of)
        self._shard.hold(self._mine, [join(run, found.get(run.parameter, ())) for run in self._mine])

    def __getstate__(self) -> dict[str, Any]:
        """Raises `MpidpError`: a copy would share memory and messages with this one."""
        raise MpidpError("a sharded optimizer cannot be copied or pickled: save full_state_dict(), on all ranks")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `MpidpError`: give all groups to the plain optimizer before it is sharded."""
        if self._is_made:
            raise MpidpError("a sharded optimizer takes no further parameters: give all to the plain one before")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Frees the shared memory. Collective."""
        self._channel.close()

    def _deal(self) -> None:
        """Determines which rank holds which runs, and prepares gathering. Collective."""
        world = self.world
        self._lists = shards(self._numels, world.size)
        nodes: list[int] = world.comm.allgather(world.node)
        held_by = holders(nodes, self.copies)
        self._mine = [run for shard, ranks in enumerate(held_by) if world.rank in ranks for run in self._lists[shard]]
        self._channel = make_channel(world)
        self._aim()

    def _aim(self) -> None:
        self._gather = Gather(self.world.rank, self._lists, self._shard.flats, self._channel)

    def _share_options(self) -> None:
        """Copies options that schedulers changed to the inner optimizer."""
        for group, own in zip(self._shard.inner.param_groups, self.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key not in ("params", "param_names")})

    def _take_options(self) -> None:
        """Copies options that the inner optimizer changed, as some count their steps there."""
        for group, own in zip(self._shard.inner.param_groups, self.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})

    def _cut(self, whole: list[dict[str, Any]], run: Run) -> dict[str, Any]:
        return cut(whole[run.parameter], self._parameters[run.parameter], run)


def _describe(optimizer: torch.optim.Optimizer) -> list[str]:
    """What must be the same on all ranks: options, and all of each parameter but its values."""
    lines = [f"optimizer {type(optimizer).__qualname__}"]
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        lines += [f"group {number}: {key} = {value!r}" for key, value in options.items() if not callable(value)]
        lines += [f"group {number}: {tuple(p.shape)}, {p.dtype}, strides {p.stride()}" for p in group["params"]]
    return lines


def _lost(run: Run, copies: int) -> LaunchError:
    advice = "Start the job again: it goes on from its newest checkpoint."
    if copies == 1:
        advice += " With copies=2 the state outlives the loss of one rank."
    error = LaunchError(
        f"the optimizer's state of elements {run.start:,} to {run.stop:,} of parameter {run.parameter} was held by "
        f"lost ranks only. {advice}"
    )
    setattr(error, SHARED_MARK, True)
    return error
