"""The run file's reduce section in, the wrapped model out; and what "auto" chose, kept with the run.

The way of reducing decides in which order numbers are added. A resumed run takes the way of its first start, so that
it continues bit for bit, and does not measure again.
"""

import logging
from pathlib import Path
from typing import Any

from torch import nn

from mpidp.config import ReduceSection
from mpidp.errors import RecordError
from mpidp.reduce.choice import REDUCERS
from mpidp.train.data_parallel import DataParallel
from mpidp.world.record_file import read_json, write_json
from mpidp.world.world import World

FILE = "reducer.json"
log = logging.getLogger("mpidp")
_OVERLAP = {"auto": None, "on": True, "off": False}


def wrap(
    module: nn.Module, world: World, section: ReduceSection, compare_steps: int, resume: Path | None
) -> DataParallel:
    """The model as the run file wants it reduced, or as before if this is a resume on as many ranks. Collective."""
    name, piece_bytes, overlap = section.reducer, section.piece_bytes, _OVERLAP[section.overlap]
    if resume is not None and section.reducer == "auto":
        remembered = world.call_on_root(lambda: _read(resume / FILE, world))
        if remembered is not None:
            name, piece_bytes = remembered["reducer"], piece_bytes or remembered["piece_bytes"]
            overlap = remembered["overlap"] if section.overlap == "auto" else overlap
    return DataParallel(
        module,
        world,
        reducer=name,
        bucket_bytes=section.bucket_bytes,
        wire=section.wire,
        error_feedback=section.error_feedback,
        piece_bytes=piece_bytes,
        overlap=overlap,
        check_finite=section.check_finite,
        compare_steps=compare_steps,
        quiet=True,
    )


def remember(model: DataParallel, run_folder: Path) -> None:
    """Writes down how the model is reduced, for the next start in a world like this."""
    world = model.world
    if world.rank != 0:
        return
    facts = {
        "ranks": world.size,
        "nodes": world.num_nodes,
        "device": world.device.type,
        "cuda_aware": world.cuda_aware.aware,
        "reducer": model.choice.name,
        "piece_bytes": model.choice.options.piece_bytes,
        "overlap": model.overlap,
        "reason": model.choice.reason,
    }
    try:
        write_json(run_folder / FILE, facts)
    except OSError as error:  # no run ends for that: the next start measures again
        log.warning("cannot write down how gradients are reduced: %s", error)


def _read(path: Path, world: World) -> dict[str, Any] | None:
    try:
        facts = read_json(path, dict)
    except FileNotFoundError:
        return None
    except RecordError as error:
        log.warning("%s: the way of reducing is chosen anew, and may round otherwise than before", error)
        return None
    here = (world.size, world.num_nodes, world.device.type, world.cuda_aware.aware)
    if tuple(facts.get(key) for key in ("ranks", "nodes", "device", "cuda_aware")) != here:
        return None
    if (
        facts.get("reducer") in REDUCERS
        and type(facts.get("piece_bytes")) is int
        and type(facts.get("overlap")) is bool
    ):
        return facts
    log.warning("%s is damaged: the way of reducing is chosen anew, and may round otherwise than before", path)
    return None
