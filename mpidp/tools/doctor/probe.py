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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpidp.errors import MpidpError
from mpidp.models.mlp import mlp
from mpidp.tools.bench.allreduce import allreduce_rows
from mpidp.tools.bench.options import AllreduceOptions
from mpidp.tools.bench.step import Workload, compare_steps
from mpidp.train.checkpoint.read import load
from mpidp.train.checkpoint.saver import Saver
from mpidp.train.data_parallel import DataParallel
from mpidp.world.start import init
from mpidp.world.world import World

NUM_BYTES, REPEATS, BATCH, FEATURES, CLASSES = 16 << 20, 5, 64, 256, 16


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


def _measure(world: World) -> dict[str, Any]:
    buffers = AllreduceOptions((NUM_BYTES,), ("copy", "mpi"), repeats=REPEATS)
    copy, allreduce = allreduce_rows(buffers, world, torch.device("cpu"))
    workload = _workload(world)
    plain, step = compare_steps(workload, ("plain", "auto"), REPEATS, world)
    return {
        "ranks": world.size,
        "num_bytes": NUM_BYTES,
        "copy_s": copy["median_s"],
        "allreduce_s": allreduce["median_s"],
        "plain_step_s": plain["median_s"],
        "step_s": step["median_s"],
        **_round_trip(world, _trained(workload, world)),
        "cuda_aware": world.cuda_aware.aware,
        "aware_reason": world.cuda_aware.reason,
        "device": str(world.device),
    }


def _workload(world: World) -> Workload:
    """A small perceptron, and a batch of this rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = mlp(inputs=FEATURES, hidden=(1024, 512), classes=CLASSES).to(world.device)
        torch.manual_seed(1 + world.rank)
        inputs, targets = torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))
    return Workload(module, inputs.to(world.device), targets.to(world.device))


def _trained(workload: Workload, world: World) -> dict[str, Tensor]:
    """The parameters after a step; that ranks agree on them is seen where they load the checkpoint of rank 0."""
    model = DataParallel(workload.module, world, quiet=True)
    workload.loss(model).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return {name: value.detach().cpu() for name, value in model.unwrap().state_dict().items()}


def _round_trip(world: World, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Save a state beside where runs would lie, and load it on every rank. Collective."""
    folder = Path(world.call_on_root(lambda: tempfile.mkdtemp(prefix=".mpidp-doctor-", dir=".")))
    try:
        return _save_and_load(world, state, folder)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


def _save_and_load(world: World, state: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
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
