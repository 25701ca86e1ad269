"""Random changes to HDF5 files, a hundred of each format; `make chaos` tries a thousand of each."""

import pytest
from chaos_file import FORMATS, try_format

CHANGES = 100


@pytest.mark.parametrize("name", FORMATS)
def test_random_changes(name: str) -> None:
    """Behaviour 57: what h5py reads, or one line; no traceback, no hang, no other value. And most changes are read."""
    counts, wrong = try_format(name, CHANGES)
    assert not wrong, "\n".join(wrong)
    assert counts["same"] > CHANGES and counts["refused"] > CHANGES
    assert counts["h5py dies, too"] < CHANGES / 10
