"""Options of `mpidp data convert` and `make` enter; the source and the layout they mean leave."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.order.keyed import check_seed
from mpidp.hdf5.write import parse_filters
from mpidp.tools.convert.arrays import open_npy, open_npz
from mpidp.tools.convert.convert import convert
from mpidp.tools.convert.csv import CsvSource
from mpidp.tools.convert.csv_options import CsvOptions
from mpidp.tools.convert.hdf5 import HDF5Source
from mpidp.tools.convert.images import ImageOptions, ImageSource
from mpidp.tools.convert.make import SyntheticSource
from mpidp.tools.convert.plan import Layout
from mpidp.tools.convert.source import Source
from mpidp.tools.data_options import ConvertOptions, MakeOptions, Written

_HDF5_SUFFIXES = (".h5", ".hdf5", ".he5", ".hdf", ".nc", ".mat")
# What nobody means to be the name of an HDF5 file.
_OTHER_SUFFIXES = (".npy", ".npz", ".csv", ".tsv", ".txt", ".png", ".jpg", ".jpeg")
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_ONLY = {
    "npy": (),
    "npz": ("fields",),
    "hdf5": ("fields", "expand_external", "stack_groups"),
    "images": ("resize", "mode"),
    "csv": ("label", "columns", "dtype", "delimiter", "no_header", "empty_as_nan"),
}


def convert_by(options: ConvertOptions) -> str:
    """Convert as asked and return what the target holds; raises `ConfigError` and `DataError`."""
    *sources, target = options.paths
    kind = _kind(sources)
    _check_options(options, kind)
    if Path(target).suffix.lower() in ("", *_OTHER_SUFFIXES):
        raise ConfigError(
            f"{target}: the last word is the HDF5 file to write; expected a name that ends in .h5, .hdf5 or the like"
        )
    if os.path.exists(target) and any(os.path.samefile(path, target) for path in sources):
        raise ConfigError(f"{target}: is source and target; write to another name, then rename it")
    if len(set(options.fields)) < len(options.fields):
        raise ConfigError(f"--fields={','.join(options.fields)}; give each only once.")
    if options.fields and options.stack_groups is not None:
        raise ConfigError("--fields and --stack-groups both say what to take; give one of them.")
    if options.shuffle_rows is not None:
        check_seed(options.shuffle_rows)
    return convert(
        _opener(kind, sources, options),
        target,
        _layout(options, options.shuffle_rows),
        workers=options.workers,
        memory_bytes=options.memory,
        overwrite=options.overwrite,
    )


def make_by(options: MakeOptions) -> str:
    """Make synthetic data as asked and return what the target holds; raises `ConfigError` and `DataError`."""
    source = SyntheticSource(options.field, options.rows, options.classes, options.seed)
    layout = _layout(options, None)
    return convert(lambda scratch: source, options.target, layout, workers=options.workers, overwrite=options.overwrite)


def _layout(options: Written, shuffle_seed: int | None) -> Layout:
    filters = parse_filters(options.compression, not options.no_byte_shuffle, options.fletcher32)
    return Layout(filters, options.chunk_rows, options.chunk_bytes, shuffle_seed)


def _kind(sources: list[str]) -> str:
    """Return what kind of source the paths are, by folder, name, or first bytes."""
    for path in sources:
        if not os.path.exists(path):
            raise DataError(f"{path}: no such file or folder; check the path")
    kinds = {path: _kind_of(path) for path in sources}
    if len(sources) > 1 and set(kinds.values()) != {"npy"}:
        raise ConfigError(
            f"{len(sources)} sources were given ({', '.join(sources)}); several are understood for .npy files only"
        )
    return kinds[sources[0]]


def _kind_of(path: str) -> str:
    if os.path.isdir(path):
        return "images"
    suffix = Path(path).suffix.lower()
    if suffix in _HDF5_SUFFIXES or _is_hdf5(path):
        return "hdf5"
    kinds = {".npy": "npy", ".npz": "npz", ".csv": "csv", ".tsv": "csv", ".txt": "csv"}
    if suffix not in kinds:
        raise ConfigError(
            f"{path}: unknown kind of source; expected .npy, .npz, .csv, .h5 or .hdf5, or a folder of images"
        )
    return kinds[suffix]


def _is_hdf5(path: str) -> bool:
    """Return whether a file, whatever its name, begins as HDF5 files do, or goes on so after a block of the user's."""
    try:
        with open(path, "rb") as file:
            for start in (0, 512, 1024, 2048):
                file.seek(start)
                if file.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE:
                    return True
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return False


def _check_options(options: ConvertOptions, kind: str) -> None:
    """Raise `ConfigError` for an option that this kind of source has no use for: it would be ignored silently."""
    for other, names in _ONLY.items():
        for name in names:
            if name not in _ONLY[kind] and getattr(options, name) != getattr(ConvertOptions(), name):
                raise ConfigError(f"--{name.replace('_', '-')} is for sources of kind {other}; this one is {kind}.")


def _opener(kind: str, sources: list[str], options: ConvertOptions) -> Callable[[Path], Source]:
    path = sources[0]
    openers: dict[str, Callable[[Path], Source]] = {
        "npy": lambda scratch: open_npy(sources),
        "npz": lambda scratch: open_npz(path, options.fields, scratch),
        "hdf5": lambda scratch: HDF5Source(path, options.fields, options.expand_external, options.stack_groups),
        "images": lambda scratch: ImageSource(path, ImageOptions(_size(options.resize), options.mode)),
        "csv": lambda scratch: CsvSource(path, _csv_options(path, options), scratch),
    }
    return openers[kind]


def _csv_options(path: str, options: ConvertOptions) -> CsvOptions:
    delimiter = "\t" if options.delimiter == "\\t" or Path(path).suffix.lower() == ".tsv" else options.delimiter
    if len(delimiter) != 1:
        raise ConfigError(f"--delimiter={options.delimiter}; expected one character, or \\t for a tab.")
    return CsvOptions(
        options.label, options.columns, options.dtype, delimiter, not options.no_header, options.empty_as_nan
    )


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(f"--resize={text}; expected WIDTHxHEIGHT, such as 224x224.")
    return int(found[1]), int(found[2])
