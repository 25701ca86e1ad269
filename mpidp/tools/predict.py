"""`mpidp predict`: its options, the run that they mean, and the file that is written.

What needs torch and MPI is in `mpidp.tools.inference`.
"""

import os
import secrets
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpidp import config as settings
from mpidp.config import RunConfig
from mpidp.errors import CheckpointError, ConfigError
from mpidp.options import Arg, Names
from mpidp.printable import listed
from mpidp.tools import checkpoint as checkpoints
from mpidp.train.checkpoint.read import best, newest_first
from mpidp.train.records.starts import run_folders
from mpidp.validate import validate
from mpidp.world.record_file import flush_folder

_LAST, _BEST = "last", "best"


@dataclass(frozen=True)
class PredictOptions:
    """Write what the model of a run returns for every sample of HDF5 files, in their order, as an HDF5 file.

    Alone, or on all ranks under mpiexec or srun, which share the samples. The model is in evaluation mode. Run files
    and run folders are programs: the modules that their module:function names stand for are imported and called.
    """

    run: Annotated[Path, Arg("RUN_FOLDER|RUN.toml", positional=True)]
    """Folder of a run, its checkpoints folder, or one checkpoint; or a run file, whose newest run folder is taken."""
    output: Annotated[Path, Arg("FILE")] = Path("predictions.h5")
    """HDF5 file to write, which must not exist."""
    data: Annotated[tuple[str, ...], Arg("FILE")] = ()
    """HDF5 files to read; else the run's data.validation, or all of data.train where there is none."""
    fields: Names = ()
    """Which of data.fields to read; else the first, which the model takes, or all if there is a data.transform."""
    checkpoint: Annotated[str, Arg("last|best|PATH")] = _LAST
    """The newest checkpoint that all ranks can read, the best one (checkpoint.best), or the path of one."""


def predict(options: PredictOptions) -> str:
    """Predict as asked; return what was written, in words. Collective.

    Raises:
        CheckpointError: no usable checkpoint, or one of another model.
        ConfigError: a run file that cannot be used; an output that exists or cannot be written.
        DataError: files or samples that cannot be used, or that the model does not take.
    """
    from mpidp.tools import inference
    from mpidp.world.start import init

    world = init()
    unfinished = world.call_on_root(lambda: _begin_output(options.output))
    try:
        config, place, is_one = world.call_on_root(lambda: _find(options))
        trained = inference.load(world, place, is_one, config)
        files = options.data or trained.config.data.validation or trained.config.data.train
        loader = inference.open_data(world, trained.config, files, options.fields)
        with closing(loader), world.status.during("predict"):
            shape = inference.write(world, loader, trained, unfinished)
    except BaseException:
        if world.rank == 0:
            unfinished.unlink(missing_ok=True)
        raise
    world.call_on_root(lambda: _publish(unfinished, options.output))
    what = f"{inference.DATASET} {' x '.join(map(str, shape))}"
    return f"{options.output}: {what}, for {listed(files)}, by {trained.checkpoint}"


def _begin_output(target: Path) -> Path:
    """Make the file that is written until it is whole; its name is of this job only, so that no other writes it too."""
    if os.path.lexists(target):
        raise ConfigError(f"--output={target} exists, and is not overwritten. Give another name.")
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        unfinished.touch(exist_ok=False)
    except OSError as error:
        raise ConfigError(f"--output={target} cannot be written: {error.strerror}. Give another place.") from error
    return unfinished


def _publish(unfinished: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"--output={target} exists by now, and is not overwritten. The predictions are {unfinished}.")
    unfinished.rename(target)
    flush_folder(target.parent)


def _find(options: PredictOptions) -> tuple[RunConfig | None, Path, bool]:
    """Return the configuration, if a run file has it; a checkpoint or a folder of them; and whether it is just one."""
    config = None
    place = options.run
    if place.suffix == ".toml" or place.is_file():
        config = settings.load(place)
        validate(config)
        if options.checkpoint in (_LAST, _BEST):
            place = _newest_folder(config, place)
    found = checkpoints.find(place if options.checkpoint in (_LAST, _BEST) else Path(options.checkpoint))
    if options.checkpoint == _BEST:
        found = [best(found[0].parent)]
    is_one = len(found) == 1
    return config, found[0] if is_one else found[0].parent, is_one


def _newest_folder(config: RunConfig, file: Path) -> Path:
    for folder in run_folders(config.run.parent, config.run.name):
        if newest_first(folder / "checkpoints"):
            return folder
    raise CheckpointError(
        f"run file {file}: no checkpoint in a folder {config.run.parent / config.run.name}. Train it, or give "
        f"--checkpoint=PATH."
    )
