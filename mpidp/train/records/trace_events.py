"""The spans of one rank come in; the events of its process in a trace go out, in Chrome's format, which Perfetto reads.

The format: "Trace Event Format", document of the Chromium project: complete events (`ph` X) with times in
microseconds, and metadata (`ph` M) that names processes and threads. Spans of one thread must lie side by side or
one in the other; phases, waits inside them and steps around them do.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mpidp.world.status import Span

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
    # Of spans that begin together the longest is the one around the others.
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
