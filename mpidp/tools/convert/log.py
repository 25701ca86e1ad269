"""Encoded chunks enter, one task after the other; a file of them and a record of what is there leave.

A file that HDF5 is writing is of no use after a kill: its tables may be half on the disk. So encoded chunks are
appended to TARGET.part, and a line for each task, with a checksum, to TARGET.part.jsonl. Whatever moment a process
dies, the lines that are whole and whose bytes are right are done.
"""

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from mpidp.errors import DataError
from mpidp.hdf5.write.write import EncodedChunk

FORMAT = 1


class PartLog:
    """The unfinished conversion beside a target, locked; raises `DataError` when another process writes it.

    `done` has a record for each finished task: position and checksum of its bytes, and for each chunk its dataset,
    first row, filter mask and size. `task_rows` are those of the first start.
    """

    def __init__(self, target: str) -> None:
        self.part, self.record = Path(f"{target}.part"), Path(f"{target}.part.jsonl")
        self.done: dict[int, dict[str, Any]] = {}
        self.task_rows: list[int] = []
        self.remarks: list[str] = []
        try:
            self._data: BinaryIO = open(self.part, "a+b")  # noqa: SIM115  # closed by close()
        except OSError as error:
            raise DataError(f"{self.part}: cannot be written: {error.strerror}; choose another folder") from error
        self._lines: TextIO | None = None
        self._lock()

    def begin(self, identity: dict[str, Any], task_rows: list[int]) -> None:
        """Take over what an earlier start has done; raises `DataError` when that was a different conversion."""
        self.task_rows = task_rows
        header = {"format": FORMAT, **json.loads(json.dumps(identity))}
        kept = self._load(header)
        self._data.truncate(max((_end(line) for line in self.done.values()), default=0))
        self._data.seek(0, os.SEEK_END)
        # Rewritten whole, which drops a torn last line and tasks whose bytes are wrong.
        fresh = self.record.with_suffix(".new")
        lines = kept or [{**header, "task_rows": task_rows}]
        fresh.write_text("".join(f"{json.dumps(line)}\n" for line in [lines[0], *self.done.values()]))
        fresh.replace(self.record)
        self._lines = open(self.record, "a")  # noqa: SIM115  # closed by close()

    def add(self, task: int, chunks: Sequence[EncodedChunk]) -> None:
        """Append the chunks of a task, then its line."""
        assert self._lines is not None
        data = b"".join(chunk.data for chunk in chunks)
        places = [[chunk.dataset, chunk.start, chunk.filter_mask, len(chunk.data)] for chunk in chunks]
        line = {"task": task, "position": self._data.tell(), "crc32": zlib.crc32(data), "chunks": places}
        try:
            self._data.write(data)
            self._data.flush()
            self._lines.write(f"{json.dumps(line)}\n")
            self._lines.flush()
        except OSError as error:
            raise DataError(
                f"{self.part}: cannot be written: {error.strerror}; make room, then give the same command again"
            ) from error
        self.done[task] = line

    def chunks(self) -> Iterator[EncodedChunk]:
        """Yield every chunk, task by task; raises `DataError` where the bytes are not those that were written."""
        for task in sorted(self.done):
            line = self.done[task]
            data = self._read(line)
            if data is None:
                raise DataError(f"{self.part}: changed since it was written; delete it and {self.record}, start again")
            position = 0
            for dataset, start, mask, size in line["chunks"]:
                yield EncodedChunk(dataset, start, mask, data[position : position + size])
                position += size

    def close(self) -> None:
        """Close both files and leave them where they are, unless nothing was begun."""
        if self._data.closed:
            return
        if self._lines is not None:
            self._lines.close()
        elif not self.record.exists():
            self.part.unlink()
        self._data.close()

    def remove(self) -> None:
        """Close and delete both files: the target is complete."""
        self.record.unlink()
        self.part.unlink()
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._data, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._data.close()
                raise DataError(f"{self.part}: another process is writing it; wait for it, or end it") from error
            self.remarks.append(f"{self.part} cannot be locked here ({error.strerror}): do not start this twice")
        if not self.part.exists() or not os.path.samestat(os.fstat(self._data.fileno()), os.stat(self.part)):
            self._data.close()
            raise DataError(f"{self.part}: another process has just ended with it; give the command again")

    def _load(self, header: dict[str, Any]) -> list[dict[str, Any]]:
        """Take over an earlier start's lines; return its header as a list, empty where there is none."""
        lines = _whole_lines(self.record)
        if not lines:
            return []
        found = {key: value for key, value in lines[0].items() if key != "task_rows"}
        if found != header:
            different = sorted(key for key in {*found, *header} if found.get(key) != header.get(key))
            raise DataError(
                f"{self.part} is part of another conversion: {_difference(different[0], found, header)}. Give the "
                f"command it was begun with, or delete {self.part} and {self.record} to start anew."
            )
        self.task_rows = lines[0]["task_rows"]
        for line in lines[1:]:
            if self._read(line) is None:
                self.remarks.append(f"{self.part}: the bytes of task {line['task']} are damaged; it is done again")
            else:
                self.done[line["task"]] = line
        return lines

    def _read(self, line: dict[str, Any]) -> bytes | None:
        """Return the bytes of a task, None if they are not those that were written."""
        self._data.flush()
        size = sum(place[3] for place in line["chunks"])
        with open(self.part, "rb") as data:
            data.seek(line["position"])
            found = data.read(size)
        return found if len(found) == size and zlib.crc32(found) == line["crc32"] else None


def _end(line: dict[str, Any]) -> int:
    return int(line["position"] + sum(place[3] for place in line["chunks"]))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record up to the first that a kill cut off."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                break
            lines.append(json.loads(text))
    return lines


def _difference(key: str, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    return f"{key} was {json.dumps(found.get(key))} and is now {json.dumps(wanted.get(key))}"
