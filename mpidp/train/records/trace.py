"""The trace of some steps of a job: `trace.json`, with what every rank did, on one time axis.

The format is Chrome's "Trace Event Format", which Perfetto reads: complete events (`ph` X) with times in microseconds,
and metadata (`ph` M) that names processes and threads. Spans of one thread must lie side by side or one in the other;
phases, waits inside them and steps around them do.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mpidp.world.clock import Reading, rank_0_ns, read_clock
from mpidp.world.status import BETWEEN, Span, Spans
from mpidp.world.world import World

NS_PER_US = 1000


def events(
    rank: int, host: str, main_thread: str, spans: Sequence[Span], to_axis_ns: Callable[[int], int]
) -> list[dict[str, Any]]:
    """Makes the events of one rank, metadata first.

    Args:
        rank: number of the process in the trace.
        host: its node.
        main_thread: name of the thread that trains; it is shown first.
        spans: what was done, in any order.
        to_axis_ns: a time of this node's clock on the axis that all ranks share, in nanoseconds from its begin.
    """
    others = sorted({span.thread for span in spans} - {main_thread})
    tracks = {name: number for number, name in enumerate([main_thread, *others])}
    found = [_metadata(rank, 0, "process_name", {"name": f"rank {rank} ({host})"})]
    found.append(_metadata(rank, 0, "process_sort_index", {"sort_index": rank}))
    for name, number in tracks.items():
        found.append(_metadata(rank, number, "thread_name", {"name": "training" if number == 0 else name}))
        found.append(_metadata(rank, number, "thread_sort_index", {"sort_index": number}))
    # Of spans that begin at the same time the longest contains the others.
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.stop_ns)):
        start_ns, stop_ns = to_axis_ns(span.start_ns), to_axis_ns(span.stop_ns)
        found.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": start_ns / NS_PER_US,
                "dur": (stop_ns - start_ns) / NS_PER_US,
                "pid": rank,
                "tid": tracks[span.thread],
            }
        )
    return found


def as_lines(found: Sequence[dict[str, Any]]) -> str:
    """The events as JSON, one a line, with commas between them."""
    return ",\n".join(json.dumps(event, separators=(",", ":")) for event in found)


def _metadata(rank: int, track: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": track, "args": arguments}


log = logging.getLogger("mpidp.rank")

FROM_STEP, STEPS = 10, 20
TAG = 7002


class Trace:
    """Traces `steps` steps, after the first `from_step` of this start, which may be slower than those to come.

    In a loop of your own, `step` is called after every step of the optimizer:

        trace = mpidp.Trace(world, "trace.json")
        for batch in loader:
            ...
            optimizer.step()
            trace.step()
        trace.close()

    The file is for Perfetto (ui.perfetto.dev) and chrome://tracing: a process for each rank, in it the training thread,
    with steps, phases and waits for other ranks, and the threads that read, reduce and save. On a GPU the times are
    those of the host, which queues work and goes on; kernels are shown by torch.profiler.

    Construction is collective.

    Args:
        world: the ranks.
        path: the file; written by rank 0, over one that is there.
        from_step: how many steps to leave out.
        steps: how many to trace; 0 for none, which costs nothing.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, world: World, path: str | os.PathLike[str], *, from_step: int = FROM_STEP, steps: int = STEPS):
        if from_step < 0 or steps < 0:
            raise ValueError(f"from_step={from_step}, steps={steps}: give numbers that are not negative")
        self.world, self.path = world, Path(os.path.expanduser(path))
        self.from_step, self.steps = from_step, steps
        self._count = 0
        self._clock: Reading | None = None
        self._step_start_ns = 0
        if steps and from_step == 0:
            self._begin()

    def step(self) -> None:
        """Marks the end of a step. Collective at the begin and end of the traced steps; else it costs nothing."""
        self._count += 1
        spans = self.world.status.spans
        if self._clock is not None and spans is not None:
            self._step_start_ns = spans.add(f"step {self.world.status.step:,}", "step", self._step_start_ns)
        if self.steps and self._count == self.from_step:
            self._begin()
        elif self._count == self.from_step + self.steps:
            self.close()

    def restart(self) -> None:
        """Marks the begin of the next step after a pause, such as an evaluation, that belongs to no step."""
        self._step_start_ns = time.monotonic_ns()

    def close(self) -> None:
        """Writes the trace of the steps so far, if it is not written yet. Collective."""
        self.steps = 0
        spans, self.world.status.spans = self.world.status.spans, None
        if self._clock is None or spans is None:
            return
        spans.end_phase(self.world.status.phase)
        first, self._clock = self._clock, None
        self._write(spans, first, read_clock(self.world))

    def give_up(self) -> None:
        """Gives up the trace, as ranks have died or this one has failed. Not collective.

        Also one that has not begun: begin and end need all ranks, and others may be one step ahead or behind.
        """
        if self.steps:
            self.steps = 0
            self._clock = self.world.status.spans = None
            log.info("the trace was given up")

    def _begin(self) -> None:
        self._clock = read_clock(self.world)
        self.world.status.spans = Spans(quiet=BETWEEN)
        self.restart()

    def _write(self, spans: Spans, first: Reading, last: Reading) -> None:
        """One rank's events after the other, so that rank 0 never holds more than those of one. Collective."""
        world = self.world
        start_ns = min(world.comm.allgather(rank_0_ns(first.at_ns, first, last)))
        error_ns = max(world.comm.allgather(max(first.error_ns, last.error_ns)))
        text = as_lines(
            events(
                world.rank,
                world.host,
                threading.main_thread().name,
                spans.found,
                lambda ns: rank_0_ns(ns, first, last) - start_ns,
            )
        )
        if world.rank != 0:
            world.comm.send(text, 0, TAG)
            return
        facts = {"ranks": world.size, "nodes": world.num_nodes, "clock_error_us": error_ns / 1e3}
        texts = self._texts(text)
        try:
            self._write_file(facts, texts)
            steps = sum(span.kind == "step" for span in spans.found)
            world.log_once(f"trace of {steps} steps: {self.path} (open it in ui.perfetto.dev)")
        except OSError as error:  # no run ends for want of a trace
            for _ in texts:  # the others wait to be rid of theirs
                continue
            log.warning("cannot write the trace %s: %s", self.path, error)

    def _texts(self, own: str) -> Iterator[str]:
        yield own
        for rank in range(1, self.world.size):
            yield self.world.comm.recv(source=rank, tag=TAG)

    def _write_file(self, facts: dict[str, float], texts: Iterator[str]) -> None:
        written = self.path.with_name(f"{self.path.name}.new")
        try:
            with open(written, "w") as file:
                file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(facts)},"traceEvents":[\n')
                for number, text in enumerate(texts):
                    file.write(f",\n{text}" if number else text)
                file.write("\n]}\n")
            written.replace(self.path)  # a reader never meets half of it
        except OSError:
            written.unlink(missing_ok=True)  # it would take what room there is
            raise
