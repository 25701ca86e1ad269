"""Phases of a step in, seconds spent in each out."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpidp.world.status import status

PHASES = ("data", "forward", "backward", "reduce", "optimizer")


class Stopwatch:
    """Adds up wall-clock seconds by phase; on a GPU they are the seconds in which the host was busy or waiting."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times a block, and says that it is what this rank does."""
        start = time.perf_counter()
        try:
            with status.during(phase):
                yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def move(self, source: str, target: str, seconds: float) -> None:
        """Seconds counted in one phase belong to another: the reduction runs inside backward."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def since(self, earlier: dict[str, float]) -> dict[str, float]:
        """Seconds by phase since a copy of `seconds` was taken."""
        return {phase: self.seconds[phase] - earlier.get(phase, 0.0) for phase in PHASES}
