"""The text of `/proc/self/maps` in, the files that this process has in memory out. Pure."""

from pathlib import Path

MAPS = Path("/proc/self/maps")


def mapped_files(maps: str) -> list[str]:
    """Their paths, in order, each once; a file whose name is gone has " (deleted)" behind it."""
    parts = (line.split(maxsplit=5) for line in maps.splitlines())
    return list(dict.fromkeys(part[5] for part in parts if len(part) == 6))
