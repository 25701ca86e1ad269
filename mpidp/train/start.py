"""One start of a run: what it keeps when ranks are lost, and the trainer that is then made anew."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from mpidp.hdf5.loader import HDF5Loader
from mpidp.train.checkpoint.saver import Saver, settle
from mpidp.train.records.recorder import Recorder, whole_lines
from mpidp.train.records.run_folder import RunFolder
from mpidp.train.stop import StopSignal
from mpidp.world.collectives import reduced
from mpidp.world.mpi import MPI
from mpidp.world.world import World


@dataclass
class Start:
    """One start of a run.

    Attributes:
        folder: the run's; None until a new one is made.
        first_step: optimizer steps done before it; None until that is known.
        since_s: when training began, by `time.perf_counter`.
        saver: of the last trainer, and so are the others.
        is_saved: whether no checkpoint was given up that was on its way when ranks were lost.
        staged: loaders whose copies of files stay on the node until others have been made.
    """

    folder: RunFolder | None = None
    first_step: int | None = None
    since_s: float = field(default_factory=time.perf_counter)
    saver: Saver | None = None
    is_saved: bool = True
    stop: StopSignal | None = None
    recorder: Recorder | None = None
    staged: list[HDF5Loader] = field(default_factory=list)

    def go_on(self, world: World) -> tuple[int, Path | None]:
        """Ends what ranks that died took part in. Collective over those that are left.

        Returns:
            The length of the metrics, on rank 0; and the newest checkpoint that this rank knows of.
        """
        assert self.folder is not None
        self.folder.take_over(world)
        newest = None if self.saver is None else self.saver.newest
        step = reduced(world.comm, -1 if self.saver is None else self.saver.step_on_its_way, MPI.MAX)
        if step >= 0:
            complete = settle(world, self.folder.checkpoints, step)
            newest = complete or newest
            self.is_saved = self.is_saved and complete is not None
        self.is_saved = world.all(self.is_saved)
        return whole_lines(self.folder.metrics) if world.rank == 0 else 0, newest

    def close(self) -> None:
        """Releases the run folder. Not collective."""
        if self.folder is not None:
            self.folder.close()
            self.folder.release()
