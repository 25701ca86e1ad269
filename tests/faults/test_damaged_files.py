"""Random changes to HDF5 files, a hundred of each format; `make chaos` tries a thousand of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from chaos_file import FORMATS, try_format

CHANGES, CHILDREN = 100, 2
Found = tuple[Counter[str], list[str]]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Future[Found]]]:
    """What comes of the changes to each format, of two formats at a time."""
    with ThreadPoolExecutor(CHILDREN) as pool:
        yield {name: pool.submit(try_format, name, CHANGES) for name in FORMATS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_random_changes(name: str, found: dict[str, Future[Found]]) -> None:
    """Behaviour 57: what h5py reads, or one line; no traceback, no hang, no other value. And most changes are read."""
    counts, wrong = found[name].result()
    assert not wrong, "\n".join(wrong)
    assert counts["same"] > CHANGES and counts["refused"] > CHANGES
    assert counts["h5py dies, too"] < CHANGES / 10
