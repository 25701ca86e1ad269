"""Enters: whatever h5py raises over an object of a file. Leaves: one `DataError` in one short line that names both."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpidp.errors import DataError, MpidpError

# h5py raises all of these over damaged files: sizes that no array can have, names that are no text, types that
# NumPy lacks, references that lead nowhere.
HDF5_ERRORS = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, SystemError, TypeError, ValueError)


def damage_text(path: str, name: str, error: BaseException) -> str:
    """Return one line that says of which object of which file h5py raised `error`."""
    place = f'{path}: "{name}"' if name else path
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{place} cannot be read; the file may be damaged. HDF5 says: {said}"


@contextmanager
def damage_told(path: str, name: str = "") -> Iterator[None]:
    """Raises `DataError` with `damage_text` for whatever h5py raises within; errors of this package pass."""
    try:
        yield
    except MpidpError:
        raise
    except HDF5_ERRORS as error:
        raise DataError(damage_text(path, name, error)) from error
