"""What each start of a run has to say of itself in, `env.json` out: a list with an entry a start. No MPI, no torch."""

import logging
from pathlib import Path
from typing import Any

from mpidp.errors import RecordError
from mpidp.world.record_file import read_json, write_json

FILE = "env.json"
log = logging.getLogger("mpidp")


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run folder, the first start first; at least one.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it is damaged.
    """
    starts = read_json(folder / FILE, list)
    if not starts or not all(isinstance(start, dict) for start in starts):
        raise RecordError(f"{folder / FILE} is damaged (it is no list of starts)")
    return starts


def add(folder: Path, start: dict[str, Any]) -> None:
    """Adds an entry. A damaged file is kept beside the new one, and no reason not to start.

    Raises:
        OSError: the file system refuses.
    """
    path = folder / FILE
    try:
        starts = read(folder)
    except FileNotFoundError:
        starts = []
    except RecordError as error:
        damaged = path.replace(path.with_name(f"{FILE}.damaged"))
        log.warning("%s; it is kept as %s, and starts before this one are not known", error, damaged.name)
        starts = []
    write_json(path, [*starts, start])


def note(folder: Path, **facts: Any) -> None:
    """Adds facts to the last entry; no run is lost for a line in its description, so a failure is only logged."""
    try:
        starts = read(folder)
        starts[-1].update(facts)
        write_json(folder / FILE, starts)
    except (OSError, RecordError) as error:
        log.warning("cannot note %s: %s", facts, error)
