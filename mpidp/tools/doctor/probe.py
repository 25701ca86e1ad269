"""The measurements behind `mpidp doctor --probe`: copies, an Allreduce, a training step, a checkpoint.

Every result is checked by value first. Times are compared with those of copies in the same run, on the same cores:
what a machine should give is what it just gave. `main` is run as a child where there is no launcher.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpidp.errors import MpidpError
from mpidp.models.mlp import mlp
from mpidp.tools.bench.timing import Side, measure
from mpidp.train.checkpoint.read import load
from mpidp.train.checkpoint.saver import Saver
from mpidp.train.data_parallel import DataParallel
from mpidp.world.mpi import MPI
from mpidp.world.start import init
from mpidp.world.world import World

NUM_BYTES, REPEATS, BATCH, FEATURES, CLASSES = 16 << 20, 5, 64, 256, 16
HIDDEN = (1024, 512)


def probe() -> dict[str, Any]:
    """Measure on all ranks; times in seconds, the slowest rank's. Collective.

    Returns:
        ranks: how many.
        num_bytes, copy_s, allreduce_s: of a float32 buffer in host memory.
        plain_step_s, step_s: a training step without and with mpidp.
        checkpoint_bytes, save_s, load_s: of the small model.
        cuda_aware, aware_reason, device: what a proof by value gave.
        error: instead of all that, what failed; the same on every rank.
    """
    try:
        world = init()
    except MpidpError as error:
        return {"error": str(error)}
    try:
        return _measure(world)
    except (MpidpError, OSError) as error:
        return {"error": str(error)}
    finally:
        world.guard.remove()


def _measure(world: World) -> dict[str, Any]:
    buffers, step = _Buffers(world), _Step(world)
    sides = [*buffers.sides(), *step.sides()]
    seconds = {name: median(times.seconds) for name, times in measure(world, sides, REPEATS).items()}
    return {
        "ranks": world.size,
        "num_bytes": NUM_BYTES,
        **{f"{name}_s": value for name, value in seconds.items()},
        **_round_trip(world, step.parallel.unwrap()),
        "cuda_aware": world.cuda_aware.aware,
        "aware_reason": world.cuda_aware.reason,
        "device": str(world.device),
    }


class _Buffers:
    """A buffer to copy and to sum."""

    def __init__(self, world: World):
        self._world = world
        self._source = torch.arange(NUM_BYTES // 4, dtype=torch.float32) % 1024  # sums are exact
        self._target = torch.zeros_like(self._source)

    def sides(self) -> list[Side]:
        """Both."""
        return [
            Side("copy", self._clear, self._copy, partial(self._check, "a copy", 1)),
            Side("allreduce", self._copy, self._allreduce, partial(self._check, "MPI's Allreduce", self._world.size)),
        ]

    def _clear(self) -> None:
        self._target.zero_()

    def _copy(self) -> None:
        self._target.copy_(self._source)

    def _allreduce(self) -> None:
        self._world.comm.Allreduce(MPI.IN_PLACE, self._target.numpy(), op=MPI.SUM)

    def _check(self, name: str, factor: int) -> None:
        if not torch.equal(self._target, self._source * factor):
            raise MpidpError(f"{name} of {NUM_BYTES} bytes gave wrong values: do not train with this library")


class _Step:
    """A training step of a small perceptron, in plain torch and with mpidp."""

    def __init__(self, world: World):
        self._world = world
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._plain, wrapped = (_model().to(world.device) for _ in range(2))
            torch.manual_seed(1 + world.rank)
            self._x = torch.randn(BATCH, FEATURES, device=world.device)
            self._y = torch.randint(CLASSES, (BATCH,), device=world.device)
        self.parallel = DataParallel(wrapped, world, quiet=True)
        both: tuple[nn.Module, ...] = (self._plain, self.parallel)
        self._optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.01) for model in both}

    def sides(self) -> list[Side]:
        """Both."""
        return [
            Side("plain_step", self._clear, partial(self._run, self._plain), partial(self._check, self._plain)),
            Side("step", self._clear, partial(self._run, self.parallel), partial(self._check, self.parallel)),
        ]

    def _clear(self) -> None:
        """Nothing to make anew: a step goes on where the last one ended."""

    def _run(self, model: nn.Module) -> None:
        loss: Tensor = functional.cross_entropy(model(self._x), self._y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizers[model].step()
        self._optimizers[model].zero_grad()
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _check(self, model: nn.Module) -> None:
        """That ranks agree on the result is seen where they load the checkpoint that rank 0 writes."""
        flat = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
        if not torch.isfinite(flat).all():
            raise MpidpError("a training step gave values that are not finite")


def _model() -> nn.Module:
    return mlp(inputs=FEATURES, hidden=HIDDEN, classes=CLASSES)


def _round_trip(world: World, module: nn.Module) -> dict[str, Any]:
    """Save the model beside where runs would lie, and load it on every rank. Collective."""
    folder = Path(world.call_on_root(lambda: tempfile.mkdtemp(prefix=".mpidp-doctor-", dir=".")))
    try:
        return _save_and_load(world, module, folder)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


def _save_and_load(world: World, module: nn.Module, folder: Path) -> dict[str, Any]:
    state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
    saver = Saver(world, folder, 1, background=False)
    start = time.perf_counter()
    saver.save(0, lambda: {"model": state}, lambda: {"rank": world.rank})
    saved = time.perf_counter()
    with world.raise_on_all_ranks("loading the checkpoint"):
        assert saver.newest is not None
        found: dict[str, Tensor] = load(saver.newest)["model"]
        if not all(torch.equal(value, found[name]) for name, value in state.items()):
            raise MpidpError("a step or a checkpoint gave other values on this rank than on rank 0")
    loaded = time.perf_counter()
    world.barrier()
    saver.close()
    num_bytes = sum(value.nbytes for value in state.values())
    return {"checkpoint_bytes": num_bytes, "save_s": saved - start, "load_s": loaded - saved}


def main() -> int:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(probe()) + "\n")
    sys.stdout.flush()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
