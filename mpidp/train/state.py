"""The class `TrainState`: the state of a training, all that a resume needs to go on exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy
import torch
from torch import Tensor

from mpidp.errors import CheckpointError
from mpidp.printable import listed
from mpidp.train.data_parallel import DataParallel
from mpidp.train.sharded_optimizer import ShardedOptimizer
from mpidp.train.sharded_state import (
    RANKS,
    SHAPES,
    ReadRank,
    SavedPart,
    by_parameter,
    like,
    overlap,
    plain_state,
    shards,
    to_parts,
)

if TYPE_CHECKING:
    from mpidp.hdf5.loader import HDF5Loader
    from mpidp.hdf5.shares import Shares

OfRank = Callable[[int], dict[str, Any]]

_DOMAIN = 0x52414E4B  # keeps random streams apart from those of the sample order


class Stateful(Protocol):
    """What torch saves and loads: schedulers, gradient scalers, averages of models."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and tuples of tensors, numbers and strings."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Loads what `state_dict` returned."""


class TrainState:
    """The state of a training: model, optimizer, scheduler, position in the data, random streams and step.

    What all ranks have in common is `shared_state()`, what only this rank has (random streams, rounding errors of a
    16-bit exchange, its shard of a sharded optimizer) is `rank_state()`; `state_dict()` is both. They are nested dicts,
    lists and tuples of tensors, numbers and strings, and refer to the tensors of the training: copy them to keep them.

        state = TrainState(model, optimizer, loader)
        saved = copy.deepcopy(state.state_dict())
        ...
        state.load_state_dict(saved)

    Attributes:
        step: optimizer steps done; the training loop counts them here.

    Args:
        model: the wrapped model; its `world` is that of the state.
        optimizer: of torch, or a `ShardedOptimizer`.
        loader: the data: an `HDF5Loader`, or the `mpidp.shares` of an ordinary `DataLoader`.
        scheduler: of learning rates, if any.
        seed: of the random streams, which are seeded anew on another number of ranks; the loader's by default.
        others: further objects with the same state on all ranks, by name, with `state_dict` and `load_state_dict`: a
            `GradScaler`, an average of the model.
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: torch.optim.Optimizer,
        loader: HDF5Loader | Shares,
        scheduler: Stateful | None = None,
        *,
        seed: int | None = None,
        others: Mapping[str, Stateful] | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.scheduler = scheduler
        self.seed = loader.order.seed if seed is None else seed
        self.others = dict(others or {})
        self.world = model.world
        self.step = 0

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.loader.epoch

    def seed_streams(self) -> None:
        """Seeds the random streams of this rank anew, from seed, rank and step. Not collective."""
        seed_streams(self.seed, self.world.rank, self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return `shared_state()` with `rank_state()` as its key "rank". Not collective."""
        return {**self.shared_state(), "rank": self.rank_state()}

    def shared_state(self) -> dict[str, Any]:
        """Return what all ranks have in common. Not collective; call `model.combine_statistics()` before."""
        state = {
            "classes": self._classes(),
            "model": self.model.state_dict(),
            "optimizer": optimizer_shared_state(self.optimizer),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "loader": self.loader.state_dict(),
            "step": self.step,
            "ranks": self.world.size,
        }
        if self.others:
            state["others"] = {name: other.state_dict() for name, other in self.others.items()}
        return state

    def rank_state(self) -> dict[str, Any]:
        """Return what only this rank has. Not collective."""
        return {
            "rng": capture_streams(self.world.device),
            "reduction": self.model.rank_state_dict(),
            "optimizer": optimizer_rank_state(self.optimizer),
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        *,
        of_rank: OfRank | None = None,
        source: str = "the state",
        accept_changed: bool = False,
    ) -> None:
        """Loads a state, taken on any number of ranks. Collective.

        On the same number of ranks training continues bit for bit. On another the samples are the same, random streams
        are seeded anew from `seed`, and rounding errors of a 16-bit exchange start from zero, which is logged.

        Args:
            state: of `state_dict()`, or of `shared_state()` on any rank.
            of_rank: returns the `rank_state()` that a rank had; called for this rank, and for others whose shards of an
                optimizer are needed. None takes `state["rank"]`.
            source: what to call the state in messages.
            accept_changed: begin the epoch anew if the data files have changed, instead of raising.

        Raises:
            CheckpointError: on all ranks: the state of another model, optimizer or scheduler.
            DataError: on all ranks: the state belongs to other data.
        """
        world = self.world
        if of_rank is None:
            of_rank = _of_this_rank(state, world.rank)
        with world.raise_on_all_ranks(f"loading {source}"):
            self._load_shared(state, of_rank, source, accept_changed)
        self.step = state["step"]
        kept = not self.model.choice.options.error_feedback
        if state["ranks"] != world.size:
            self.seed_streams()
        else:
            with world.raise_on_all_ranks(f"loading {source}"):
                own = of_rank(world.rank)
                restore_streams(own["rng"], world.device)
                kept |= self.model.load_rank_state_dict(own["reduction"])
        if not world.all(kept):
            world.log_once(
                "error feedback starts from nothing: the rounding errors belong to another number or layout of ranks, "
                "or to another way of reducing"
            )

    def _load_shared(self, state: dict[str, Any], of_rank: OfRank, source: str, accept_changed: bool) -> None:
        check_model(self.model.state_dict(), state["model"], source)
        # Torch would load the state of one class into another, and fail later or compute wrong results.
        for part, here in self._classes().items():
            if state["classes"][part] != here:
                raise CheckpointError(
                    f"{source} was made with {part} {state['classes'][part]}, this run has {here}. "
                    f"Resume with the same, or start a new run."
                )
        found = state.get("others", {})
        if found.keys() != self.others.keys():
            raise CheckpointError(
                f"{source} holds {listed(found) or 'nothing'} beside the model, this run has "
                f"{listed(self.others) or 'nothing'}. Resume with the same, or start a new run."
            )
        self.model.load_state_dict(state["model"])
        try:
            restore_optimizer(self.optimizer, state["optimizer"], lambda rank: of_rank(rank)["optimizer"])
            if self.scheduler:
                self.scheduler.load_state_dict(state["scheduler"])
            for name, other in self.others.items():
                other.load_state_dict(found[name])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{source} was made with another optimizer or scheduler: {error}") from error
        accept = {"accept_changed": True} if accept_changed else {}
        self.loader.load_state_dict(state["loader"], **accept)

    def _classes(self) -> dict[str, str]:
        """Names of the classes whose state is kept."""
        scheduler = "none" if self.scheduler is None else type(self.scheduler).__qualname__
        return {"optimizer": _class_name(self.optimizer), "scheduler": scheduler}


def _of_this_rank(state: dict[str, Any], here: int) -> OfRank:
    def of_rank(rank: int) -> dict[str, Any]:
        if rank != here or "rank" not in state:
            raise CheckpointError(f"the part that rank {rank} had is needed, and not there (of_rank)")
        own: dict[str, Any] = state["rank"]
        return own

    return of_rank


def check_model(expected: dict[str, Tensor], found: dict[str, Tensor], source: str) -> None:
    """Raises CheckpointError, naming the first difference, for the state of another model."""
    advice = "Resume with the model it was made with, or start a new run."
    for name in [*expected, *found]:
        if name not in found:
            raise CheckpointError(f"{source} is of another model: it has no {name!r}. {advice}")
        if name not in expected:
            raise CheckpointError(f"{source} is of another model: this one has no {name!r}. {advice}")
        if expected[name].shape != found[name].shape or expected[name].dtype != found[name].dtype:
            raise CheckpointError(
                f"{source} is of another model: {name!r} is {_kind(found[name])} there and "
                f"{_kind(expected[name])} here. {advice}"
            )


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def optimizer_shared_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What rank 0 saves for all ranks: the whole state_dict, or of a sharded optimizer all but its state."""
    if not isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_dict()
    return {"param_groups": optimizer.groups_state_dict(), SHAPES: _shapes(optimizer), RANKS: optimizer.world.size}


def optimizer_rank_state(optimizer: torch.optim.Optimizer) -> list[SavedPart]:
    """What each rank saves in its own file."""
    if not isinstance(optimizer, ShardedOptimizer):
        return []
    return [(run.parameter, run.start, run.stop, state) for run, state in optimizer.own_parts()]


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], read: ReadRank) -> None:
    """Loads the state of a checkpoint. Not collective; call it on every rank.

    Args:
        optimizer: sharded or not.
        saved: what `optimizer_shared_state` returned, sharded or not.
        read: returns what `optimizer_rank_state` returned on a rank; called only for ranks whose state is needed.
    """
    if RANKS not in saved:
        optimizer.load_state_dict(saved)
    elif not isinstance(optimizer, ShardedOptimizer) or saved[SHAPES] != _shapes(optimizer):
        optimizer.load_state_dict(plain_state(saved, read))
    else:
        optimizer.load_groups_state_dict(saved["param_groups"])
        of_ranks = shards([parameter.numel() for parameter in like(saved)], saved[RANKS])
        wanted = by_parameter(optimizer.runs, lambda run: run)
        needed = [
            rank
            for rank, runs in enumerate(of_ranks)
            if any(overlap(run, other) for run in runs for other in wanted.get(run.parameter, ()))
        ]
        optimizer.load_parts(part for rank in needed for part in to_parts(read(rank)))


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    """Name of the optimizer's class; of a sharded one, that of the inner optimizer."""
    return type(optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer).__qualname__


def _shapes(optimizer: ShardedOptimizer) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(p.shape), p.stride()) for group in optimizer.param_groups for p in group["params"]]


def seed_streams(seed: int, rank: int, step: int) -> None:
    """Seeds torch (all devices), numpy and random for what happens from `step` on: dropout, augmentation."""
    torch_seed, numpy_seed, python_seed = numpy.random.SeedSequence([_DOMAIN, seed, rank, step]).generate_state(3)
    torch.manual_seed(int(torch_seed))
    numpy.random.seed(int(numpy_seed))
    random.seed(int(python_seed))


def capture_streams(device: torch.device) -> dict[str, Any]:
    """The state of all streams of this rank, in types that `torch.load(weights_only=True)` accepts."""
    kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(keys.astype(numpy.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_streams(state: dict[str, Any], device: torch.device) -> None:
    """Restores the streams of this rank as `capture_streams` found them."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
