"""Options of `mpidp bench allreduce`, `step` and `loader`. Imports neither torch nor MPI."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from mpidp.errors import ConfigError
from mpidp.options import Arg, Names

BUFFER_ITEMSIZE = 4  # buffers are float32

# Lists are one word with commas, as in --bytes=4096,1048576, so that options may come in any order.
_Sizes = Annotated[
    tuple[int, ...], Arg("BYTES,BYTES", lambda word: tuple(int(size) for size in word.split(",")), name="bytes")
]


@dataclass(frozen=True)
class AllreduceOptions:
    """Time the mean of a float32 buffer over the ranks. Run it under mpiexec or srun."""

    sizes: _Sizes = (4096, 1 << 20, 64 << 20)
    """Buffer sizes in bytes."""
    reducers: Names = ("auto", "node", "flat", "naive", "mpi", "copy")
    """What to time: reducers, such as node or flat/bf16; mpi, the library's plain Allreduce; copy, the limit."""
    against: Literal["none", "gloo"] = "none"
    """Time torch.distributed's all_reduce over Gloo in the same run."""
    repeats: int = 20
    """Timed repeats of each row."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        _check_repeats(self.repeats)
        _check_distinct("--reducers", self.reducers)
        _check_distinct("--bytes", self.sizes)
        odd = [size for size in self.sizes if size <= 0 or size % BUFFER_ITEMSIZE]
        if odd:
            raise ConfigError(f"--bytes={odd[0]}; expected a positive multiple of {BUFFER_ITEMSIZE} (float32).")


@dataclass(frozen=True)
class StepOptions:
    """Time a training step of a reference model. Run it under mpiexec or srun."""

    model: Literal["transformer", "mlp"] = "transformer"
    """Which model: 21 or 8.7 million parameters."""
    reducers: Names = ("null", "auto", "node", "flat")
    """What to time: reducers, such as node or flat/bf16/overlap; plain, the model without a wrapper."""
    scale: int = 1
    """How many times the model's usual local batch each rank computes on."""
    against: Literal["none", "ddp"] = "none"
    """Time torch's DistributedDataParallel over Gloo in the same run."""
    repeats: int = 20
    """Timed steps of each row."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        _check_repeats(self.repeats)
        _check_distinct("--reducers", self.reducers)
        if self.scale < 1:
            raise ConfigError(f"--scale={self.scale}; expected at least 1.")


@dataclass(frozen=True)
class LoaderOptions:
    """Time how one process reads an HDF5 file, beside what the machine allows. Starts no MPI."""

    file: Annotated[str, Arg("FILE", positional=True)]
    """The HDF5 file."""
    fields: Names = ("x", "y")
    """Its datasets."""
    global_batch: int = 256
    """Samples of a batch."""
    shuffles: Names = ("streams", "full", "none")
    """Orders of mpidp's loader to time."""
    samples: int = 120_000
    """Samples of a repeat; the loader continues into the next epochs, the limits read at most those of the file."""
    threads: int = 0
    """Threads of mpidp's loader; 0 for the cores of this process."""
    cold: bool = False
    """Ask the system to drop the file from its page cache before each repeat."""
    repeats: int = 5
    """Timed repeats of each row."""
    json: bool = False
    """Print one line of JSON instead of a table."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot be used."""
        _check_repeats(self.repeats)
        _check_distinct("--fields", self.fields)
        _check_distinct("--shuffles", self.shuffles)
        if self.samples < 1 or self.threads < 0:
            raise ConfigError(f"--samples={self.samples} --threads={self.threads}; expected 1 or more, 0 or more.")


def _check_repeats(repeats: int) -> None:
    if repeats < 1:
        raise ConfigError(f"--repeats={repeats}; expected at least 1.")


def _check_distinct(option: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values):
        raise ConfigError(f"{option}={','.join(map(str, values))}; expected each only once.")


COMM_DTYPES = ("bf16", "fp16")
OVERLAPS = {"overlap": True, "after": False}
# Half a unit in the last place, twice: when a number is sent, and for the mean.
ROUNDING = {"full": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10}


@dataclass(frozen=True)
class Variant:
    """One way to reduce, as a benchmark's row is called."""

    reducer: str
    comm_dtype: str = "full"
    overlap: bool | None = None

    @property
    def tolerance(self) -> float:
        """What rounding to 16 bits may change, as a share of the largest contribution."""
        return ROUNDING[self.comm_dtype]


def parse_variant(name: str, known: Sequence[str]) -> Variant:
    """Reads REDUCER[/bf16|/fp16][/overlap|/after].

    Raises:
        ConfigError: a part that is not known.
    """
    reducer, *parts = name.split("/")
    dtypes = [part for part in parts if part in COMM_DTYPES]
    overlaps = [OVERLAPS[part] for part in parts if part in OVERLAPS]
    if reducer not in known or len(dtypes) > 1 or len(overlaps) > 1 or len(dtypes) + len(overlaps) < len(parts):
        raise ConfigError(
            f"--reducers: {name!r} is not known. Known: {', '.join(known)}; behind a reducer /bf16 or /fp16 for "
            f"the comm_dtype, and /overlap or /after (backward) for when it works."
        )
    return Variant(reducer, dtypes[0] if dtypes else "full", overlaps[0] if overlaps else None)
