"""Requests to stop, by a signal or a file `STOP`; all ranks stop after the same step."""

import logging
import time
from pathlib import Path
from typing import NoReturn

from mpidp.world import signals
from mpidp.world.collectives import DelayedMaximum
from mpidp.world.exit import STOPPED_EARLY, leave
from mpidp.world.world import World

log = logging.getLogger("mpidp.rank")

# A file system that is shared by thousands of ranks is asked by one of them, and not at every step.
FILE_INTERVAL_S = 1.0
_FILE = 1  # below every signal's place, so that a signal is named where both came
_REASONS = ("", "the file STOP", *(number.name for number in signals.STOP_SIGNALS))


class StopSignal:
    """Whether the job was asked to stop: by SIGTERM or SIGUSR2 to any of its ranks, or by a file.

    In a loop of your own, after the optimizer's step:

        if stop.agreed():   # on every rank, after the same step
            save(...)
            stop.exit()     # exit code 75: a job script may requeue

    Making one is collective, and from then on these signals no longer end the process.

    Args:
        world: the ranks.
        file: a path that asks to stop when something lies there, looked at by rank 0 once a second; it is removed
            when the ranks agree, so that the next start goes on. None for no file.
        told: `told` of a former StopSignal, if some of its ranks have died.

    Raises:
        RuntimeError: not made in the main thread.
    """

    def __init__(self, world: World, file: Path | None = None, told: str = ""):
        signals.watch()
        self.world = world
        self.file = file if world.rank == 0 else None
        self._maximum = DelayedMaximum(world.comm)
        self._looked = float("-inf")
        self._reason, self._told = "", told

    def agreed(self) -> str:
        """Return why all ranks stop now ("SIGTERM", "SIGUSR2", "the file STOP"), or "". Collective; once a step.

        With several ranks a request is returned one call later, as the message travels during the step.
        """
        if not self._reason:
            self._reason = _REASONS[self._maximum.exchange(self._own())]
            if self._reason and self.file is not None:
                self.file.unlink(missing_ok=True)
        return self._reason

    @property
    def told(self) -> str:
        """Why all ranks will stop, as far as this rank knows, though others may not know yet; or ""."""
        return self._reason or self._told

    def exit(self) -> NoReturn:
        """Ends every rank with exit code 75: stopped early after a save, safe to start again. Collective."""
        self._maximum.close()  # signals stay harmless: a scheduler may send a second one meanwhile
        leave(self.world, STOPPED_EARLY)

    def close(self) -> None:
        """Frees the communicator and restores the former signal handlers. Collective."""
        self._maximum.close()
        signals.unwatch()

    def _own(self) -> int:
        """What this rank knows, as a place in `_REASONS`."""
        if self._told:  # some may have heard of it before ranks were lost, and others not
            return _REASONS.index(self._told)
        received = signals.received()
        if received is not None:
            return _REASONS.index(received.name)
        return _FILE if self._file_is_there() else 0

    def _file_is_there(self) -> bool:
        now = time.monotonic()
        if self.file is None or now - self._looked < FILE_INTERVAL_S:
            return False
        self._looked = now
        try:
            return self.file.exists()
        except OSError as error:  # a file system that does not answer is no request to stop
            log.warning("cannot look for %s: %s", self.file, error)
            return False
