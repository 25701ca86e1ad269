"""The name of a compressor enters; the filters of chunks to be written leave, and h5py's arguments for them."""

from dataclasses import dataclass
from typing import Any

from mpidp.errors import ConfigError


@dataclass(frozen=True)
class Filters:
    """How chunks are written.

    Attributes:
        compression: "none", "gzip", "lzf", "zstd", "lz4", "blosc-lz4", "blosc-zstd" or "blosc-blosclz".
        level: the compressor's level; None for its default.
        shuffle: bytes of equal significance are put together first, which lets numbers be compressed better.
        fletcher32: each chunk ends with a checksum, which HDF5 checks whenever it reads the chunk.
    """

    compression: str = "gzip"
    level: int | None = 4
    shuffle: bool = True
    fletcher32: bool = False

    def __str__(self) -> str:
        level = "" if self.level is None else f":{self.level}"
        return " ".join(
            [f"{self.compression}{level}", *["shuffle"] * self.has_shuffle, *["fletcher32"] * self.fletcher32]
        )

    @property
    def has_shuffle(self) -> bool:
        """Whether bytes are shuffled: that alone would cost time and gain nothing."""
        return self.shuffle and self.compression != "none"


# Name -> (lowest level, highest level), None where there are no levels.
LEVELS: dict[str, tuple[int, int] | None] = {
    "none": None,
    "gzip": (0, 9),
    "lzf": None,
    "zstd": (1, 22),
    "lz4": None,
    "blosc-lz4": (0, 9),
    "blosc-zstd": (0, 9),
    "blosc-blosclz": (0, 9),
}
_DEFAULT_LEVELS = {"gzip": 4, "zstd": 3, "blosc-lz4": 5, "blosc-zstd": 5, "blosc-blosclz": 5}


def parse_filters(text: str, shuffle: bool, fletcher32: bool) -> Filters:
    """Return the filters that NAME or NAME:LEVEL means; raises `ConfigError` for what is not known or not installed."""
    name, colon, level_text = text.partition(":")
    if name not in LEVELS:
        raise ConfigError(f"--compression={text}; known are {', '.join(LEVELS)}, some with :LEVEL as in gzip:4.")
    levels = LEVELS[name]
    level = _DEFAULT_LEVELS.get(name)
    if colon:
        if levels is None:
            raise ConfigError(f"--compression={text}: {name} has no levels; write --compression={name}.")
        if not level_text.isdecimal() or not levels[0] <= int(level_text) <= levels[1]:
            raise ConfigError(f"--compression={text}; expected a level from {levels[0]} to {levels[1]}.")
        level = int(level_text)
    filters = Filters(name, level, shuffle, fletcher32)
    creation_arguments(filters)
    return filters


def creation_arguments(filters: Filters) -> dict[str, Any]:
    """Return h5py's arguments for the filters; raises `ConfigError` where hdf5plugin is needed and missing."""
    name, level = filters.compression, filters.level
    if name == "none":
        return {}
    if name in ("gzip", "lzf"):
        return {"compression": name, "compression_opts": level, "shuffle": filters.has_shuffle}
    try:
        import hdf5plugin
    except ImportError as error:
        raise ConfigError(
            f"--compression={name} needs the package hdf5plugin: pip install 'mpidp[compression]', or use gzip."
        ) from error
    arguments: dict[str, Any] = {} if level is None else {"clevel": level}
    if name.startswith("blosc-"):  # which shuffles by itself
        arguments["cname"] = name.removeprefix("blosc-")
        arguments["shuffle"] = hdf5plugin.Blosc.SHUFFLE if filters.has_shuffle else hdf5plugin.Blosc.NOSHUFFLE
        return dict(hdf5plugin.Blosc(**arguments))
    chosen = hdf5plugin.Zstd(**arguments) if name == "zstd" else hdf5plugin.LZ4(**arguments)
    return {**chosen, "shuffle": filters.has_shuffle}
