"""Command-line options of `mpidp data verify`, `convert` and `make`. Starts no MPI."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from mpidp.errors import ConfigError
from mpidp.options import Arg, Names

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_size(text: str) -> int:
    """Return the bytes that a number with an optional unit means, such as 512KiB; raises `ValueError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]iB|B|)", text)
    if found is None:
        raise ValueError(f"{text}; expected bytes, such as 65536, 512KiB, 1.5MiB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])


_Size = Annotated[int, Arg("BYTES", parse_size)]


@dataclass(frozen=True)
class InspectOptions:
    """Describe an HDF5 file as the loader sees it: datasets, what a run would make of them, and advice.

    Datasets are shown with shape, type, layout, chunks, filters, size and attributes. Exit code 1 if an object is
    damaged.
    """

    file: Annotated[str, Arg("FILE", positional=True)]
    """The HDF5 file."""


@dataclass(frozen=True)
class VerifyOptions:
    """Read and decode every chunk of HDF5 files and name all that is wrong.

    Findings are chunks that cannot be read or decoded (checksums included), chunks that were never written, values
    that are not finite, uint64 values that int64 cannot hold, and links, virtual datasets and external files that
    lead nowhere. Exit code 1 when there is one. Alone, or on all ranks under mpiexec or srun, which share the chunks.
    """

    files: Annotated[tuple[str, ...], Arg("FILE", positional=True)]
    """HDF5 files."""
    limit: int = 20
    """How many findings are named for each file; the others are counted."""
    json: bool = False
    """Print one line of JSON instead of text."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        if self.limit < 1:
            raise ConfigError(f"--limit={self.limit}; expected at least 1.")


@dataclass(frozen=True)
class Written:
    """How a file is written."""

    compression: Annotated[str, Arg("NAME[:LEVEL]")] = "gzip:4"
    """none, gzip:0-9, lzf, and with the extra `compression` zstd:1-22, lz4, and blosc-lz4, blosc-zstd or blosc-blosclz
    with a level of 0-9."""
    no_byte_shuffle: bool = False
    """Compress values as they are, instead of bytes of equal significance together (HDF5's shuffle filter)."""
    fletcher32: bool = False
    """End each chunk with a checksum, which HDF5 checks whenever it reads the chunk."""
    chunk_rows: int = 0
    """Rows of a chunk; 0 for what gives chunks of up to 512 KiB, and at least 64 chunks where rows are few."""
    chunk_bytes: _Size = 0
    """Instead: the size of a chunk of the largest dataset, such as 512KiB or 1MiB."""
    workers: int = 0
    """Threads that read and compress; 0 for one a core. Compressors other than gzip run one at a time."""
    overwrite: bool = False
    """Replace the target if it exists, when its successor is complete."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        if self.chunk_rows < 0:
            raise ConfigError(f"--chunk-rows={self.chunk_rows}; expected a number of rows, or 0 for the default.")
        if self.chunk_rows and self.chunk_bytes:
            raise ConfigError("--chunk-rows and --chunk-bytes say the same thing; give one of them.")
        if self.workers < 0:
            raise ConfigError(f"--workers={self.workers}; expected a number of threads, or 0 for one a core.")


@dataclass(frozen=True)
class ConvertOptions(Written):
    """Write data as an HDF5 file that is read fast: mpidp data convert SOURCE [SOURCE ...] TARGET.

    A SOURCE is .npy files (each becomes a dataset of its name), an .npz file, a folder of images with a subfolder for
    each class (x, y), a .csv file (x, and y by --label), or an HDF5 file (all datasets, or --fields; attributes are
    links and what cannot be chunked are kept). The work is spread over the cores of this node. The target appears when
    it is complete; until then it lies in a folder TARGET.*.part beside it, which only a kill leaves there.
    """

    paths: Annotated[tuple[str, ...], Arg("SOURCE ... TARGET", positional=True)] = ()
    """What to convert, and last the HDF5 file to write."""
    fields: Names = ()
    """HDF5 and .npz: only these datasets."""
    expand_external: bool = False
    """HDF5: copy what lies in other files, too: external links (else kept as links), external raw files and sources of
    virtual datasets (else refused). Such a file may name any file that you can read."""
    stack_groups: Annotated[str | None, Arg("GROUP")] = None
    """HDF5: make one dataset of each field of the groups in this group (/ for the file), a group being a row, in
    natural order of their names."""
    shuffle_rows: int | None = None
    """Write the rows in a random order that follows from this seed, the same for all datasets."""
    memory: _Size = 1 << 30
    """What all threads together may hold. With --shuffle-rows, HDF5 is read 5 x workers x its size / memory times."""
    resize: Annotated[str | None, Arg("WIDTHxHEIGHT")] = None
    """Images: bring all to this size."""
    mode: Literal["L", "RGB", "RGBA"] | None = None
    """Images: bring all to grey (L), RGB or RGBA."""
    label: str | None = None
    """CSV: the column that becomes y. Words become numbers; their names are kept in y_classes."""
    columns: Names = ()
    """CSV: the columns of x; all but the label if not given."""
    dtype: Literal["float32", "float64"] = "float32"
    """CSV: the type of x."""
    delimiter: str = ","
    """CSV: what separates cells; \\t for a tab."""
    no_header: bool = False
    """CSV: the first line holds numbers; columns are called 0, 1, 2, ..."""
    empty_as_nan: bool = False
    """CSV: empty cells become NaN instead of an error."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        super().__post_init__()
        if len(self.paths) < 2:
            raise ConfigError("mpidp data convert takes SOURCE and TARGET; see mpidp data convert --help.")


@dataclass(frozen=True)
class MakeOptions(Written):
    """Write synthetic data that can be learnt: mpidp data make TARGET --field=x:float32:3,32,32 --field=y:int64.

    A whole-number field without a shape is the class of the row. Other values scatter around a pattern of the class.
    Values follow from the seed, whatever the chunks, filters and workers.
    """

    target: Annotated[str, Arg("TARGET", positional=True)] = ""
    """The HDF5 file to write."""
    rows: int = 1000
    """Number of rows."""
    field: Annotated[tuple[str, ...], Arg("NAME:TYPE[:SIZE,SIZE]", append=True)] = ()
    """A dataset, such as x:float32:3,32,32 or y:int64; give it once for each."""
    classes: int = 10
    """Number of classes."""
    seed: int = 0
    """What everything random follows from."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        super().__post_init__()
        if not self.target:
            raise ConfigError("mpidp data make takes the TARGET to write; see mpidp data make --help.")
