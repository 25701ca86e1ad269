"""What the tests of `mpidp data` share: running a command, and whether two HDF5 files hold the same."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpidp.cli import main


def run(*words: object) -> int:
    return main(["data", *map(str, words)])


def error_of(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> str:
    """Run a command that must fail with this exit code; return its message."""
    capsys.readouterr()
    assert run(*words) == code
    return capsys.readouterr().err


def read(path: Path) -> dict[str, Any]:
    """All datasets of a file, by h5py."""
    found: dict[str, Any] = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def assert_same(found: Any, expected: Any) -> None:
    """Equal values, NaN included, of equal type and shape."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".part" in path.name)
