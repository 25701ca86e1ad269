"""Every rank's view of a run's checkpoints in, the newest one that all of them can read out. Collective.

Nodes may see a file system in different states: a file that is whole on one may be stale or missing on another. So each
rank checks what it will load, and all files are checked by some rank.
"""

from pathlib import Path

from mpidp.errors import CheckpointError
from mpidp.train.checkpoints import checkpoint
from mpidp.train.checkpoints import manifest as manifests
from mpidp.world.world import World


def newest_readable(world: World, folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint of which every rank can read its share, and a line for each newer one passed over.

    Args:
        world: the ranks.
        folder: the run's `checkpoints` folder.

    Raises:
        CheckpointError: none is usable; says why for each, and which rank found it so.
    """
    with world.raise_on_all_ranks("looking for checkpoints"):
        mine = [path.name for path in checkpoint.newest_first(folder)]
    names = {name for of_rank in world.comm.allgather(mine) for name in of_rank}
    passed_over: list[str] = []
    for path in sorted((folder / name for name in names), key=checkpoint.by_step, reverse=True):
        fault = _find_fault_of_all(world, path)
        if fault is None:
            return path, passed_over
        passed_over.append(f"{path.name}: {fault}")
    with world.raise_on_all_ranks("looking for checkpoints"):
        raise checkpoint.none_usable(folder, passed_over)


def _find_fault_of_all(world: World, path: Path) -> str | None:
    """The fault that the lowest rank found, the same on every rank, or None. Collective."""
    found: list[tuple[str | None, str, str]] = world.comm.allgather((*_examine(world, path), world.host))
    faults = [fault for fault, _, _ in found]
    wrong = [rank for rank, fault in enumerate(faults) if fault is not None]
    if wrong:
        where = "" if len(wrong) == world.size else f", seen by rank {wrong[0]} on {found[wrong[0]][2]}"
        return f"{faults[wrong[0]]}{where}"
    texts = [text for _, text, _ in found]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        return f"{manifests.NAME} differs between rank 0 on {found[0][2]} and rank {other} on {found[other][2]}"
    return None


def _examine(world: World, path: Path) -> tuple[str | None, str]:
    """What is wrong for this rank, or None; and the manifest's text."""
    if not path.is_dir():
        return "it is not there", ""
    try:
        manifest = manifests.read(path)
    except CheckpointError as error:
        return str(error), ""
    return checkpoint.find_fault(path, shares(world.rank, world.size, manifest.ranks)), manifest.text()


def shares(rank: int, size: int, saved_ranks: int) -> list[str]:
    """Names of the files that a rank checks: the common state, and its own, or its share of all where sizes differ."""
    return [checkpoint.STATE, *(checkpoint.part_name(part) for part in range(rank, saved_ranks, size))]
