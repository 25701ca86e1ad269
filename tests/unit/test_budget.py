"""Streams, mixing depth and room for groups: from the data and a node's memory; and what users are warned of."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.gather import number_of_slots
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.memory_budget import (
    MOST_NODE_BYTES,
    amplification,
    choose_mixing,
    default_node_bytes,
    resources,
    warnings_about,
)
from mpidp.hdf5.order import Order

MIB = 2**20


def test_an_eighth_of_the_node() -> None:
    """At most 2 GiB, also where the system does not say."""
    assert default_node_bytes(4 * 2**30) == 2**29
    assert default_node_bytes(2**40) == default_node_bytes(None) == MOST_NODE_BYTES


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """40 chunks of 16 rows and 128 KiB, compressed."""
    path = tmp_path_factory.mktemp("budget") / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((640, 1024)), chunks=(16, 1024), compression="gzip")
    return describe(path, ("x",))


def test_depth_gives_way_before_streams(dataset: DataSet) -> None:
    """Half of the memory is for groups; with much of it, what was usual before."""
    found = {mib: choose_mixing(dataset, mib * MIB, None, None) for mib in (100, 16, 8, 4, 2, 1, 0)}
    assert found == {100: (64, 4), 16: (16, 4), 8: (8, 4), 4: (8, 2), 2: (8, 1), 1: (4, 1), 0: (1, 1)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (2**13, 64, 4)), ({"chunks": (2**12,)}, (2**13, 64, 4)), ({"chunks": (2**18,)}, (2**18, 8, 2))],
)
def test_rows_of_a_byte(tmp_path: Path, options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """Their places, not their bytes, are what mixing them costs: before a batch, those of some millions are sorted."""
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=np.zeros(2**24, "u1"), compression="gzip" if options else None, **options)
    tiny = describe(tmp_path / "a.h5", ["x"])
    assert (tiny.files[0].range_rows, *choose_mixing(tiny, MOST_NODE_BYTES, None, None)) == expected


def test_what_is_given_stands(dataset: DataSet) -> None:
    assert choose_mixing(dataset, MIB, 7, 3) == (7, 3)
    assert choose_mixing(dataset, 8 * MIB, 32, None) == (32, 1)
    assert choose_mixing(dataset, 8 * MIB, None, 1) == (32, 1)


@given(
    heights=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    streams=st.integers(1, 20),
    mixing=st.integers(1, 4),
    size=st.integers(1, 40),
    threads=st.integers(1, 8),
    rank_bytes=st.integers(1, 10**7),
    row_bytes=st.integers(1, 10**4),
    data=st.data(),
)
def test_room_for_groups(
    heights: list[int],
    streams: int,
    mixing: int,
    size: int,
    threads: int,
    rank_bytes: int,
    row_bytes: int,
    data: st.DataObject,
) -> None:
    """Behaviour 28: a group a stream and one more always; what is beyond that fits into the rank's memory."""
    rank = data.draw(st.integers(0, size - 1))
    order = Order(np.array(heights), 0, streams, mixing, 4)
    use = resources(order, row_bytes, rank_bytes, threads, size, rank)
    slots = number_of_slots(streams, size, rank)
    assert slots == max(len(range(rank, streams, size)), int(size > streams))
    assert use.held_groups >= slots + 1
    group_bytes = mixing * max(heights) * row_bytes
    assert use.held_groups == slots + 1 or use.held_groups * group_bytes <= rank_bytes
    assert use.kept_bytes + use.cache_bytes <= rank_bytes and use.threads == threads


def order_of(dataset: DataSet, **options: Any) -> Order:
    given_options = {"seed": 0, "streams": 8, "mixing_chunks": 4, "global_batch": 32, **options}
    return Order(dataset.chunk_rows, **given_options)


def test_amplification(dataset: DataSet) -> None:
    """Bytes decoded for one that is used: in streams one; a chunk a row where a full shuffle cannot keep chunks."""
    assert amplification(order_of(dataset), dataset, 100 * MIB, 4) == 1
    assert amplification(order_of(dataset, streams=2), dataset, 100 * MIB, 8) == 4
    assert amplification(order_of(dataset, shuffle="full"), dataset, 100 * MIB, 1) == 1
    assert amplification(order_of(dataset, shuffle="full"), dataset, MIB, 1) == 16
    assert amplification(order_of(dataset, shuffle="none"), dataset, MIB, 1) == 1


def test_warnings_hold_figures(dataset: DataSet) -> None:
    """A small window, many ranks for few streams, a full shuffle of large chunks, streams beyond the memory."""
    assert not warnings_about(order_of(dataset), dataset, 100 * MIB, 4)
    cases = [
        (order_of(dataset, streams=1, mixing_chunks=1), 100 * MIB, 1, r"1 streams of 1 chunks.*16 samples mixed"),
        (order_of(dataset, streams=2), 100 * MIB, 8, "4 bytes are decoded for each byte used.*8 ranks share 2 streams"),
        (order_of(dataset, shuffle="full"), MIB, 1, "16 bytes are decoded for each byte used.*about 16 rows"),
        (order_of(dataset, streams=40), 10 * MIB, 1, "40 streams of 4 chunks need 20 MiB on a rank.* of 10 MiB"),
    ]
    for order, rank_bytes, size, text in cases:
        (line,) = warnings_about(order, dataset, rank_bytes, size)
        with pytest.raises(AssertionError, match=f"a.h5: .*{text}"):
            raise AssertionError(line)


def test_what_was_chosen_is_in_the_checkpoint(dataset: DataSet) -> None:
    """Behaviour 25: a node with other memory goes on in the same order."""
    path = dataset.files[0].path
    large, small = (
        HDF5Loader(path, ("x",), 8, memory_bytes=100 * MIB),
        HDF5Loader(path, ("x",), 8, memory_bytes=4 * MIB),
    )
    assert (large.order.streams, large.order.mixing_chunks) == (64, 4)
    assert (small.order.streams, small.order.mixing_chunks) == (8, 2)
    rows = [batch.indices.tolist() for batch in large]
    large.load_state_dict({**large.state_dict(), "epoch": 0})
    small.load_state_dict({**large.state_dict(), "position": 80})
    assert [batch.indices.tolist() for batch in small] == rows[10:]
    large.close()
    small.close()


@pytest.mark.filterwarnings("ignore:.*16 bytes are decoded for each byte used")
@pytest.mark.parametrize("shuffle", ["streams", "full", "none"])
def test_memory_stays_within_the_budget(dataset: DataSet, shuffle: Any) -> None:
    """Behaviour 28: what the loader's memory may be follows from `memory_bytes`, and groups stay within it."""
    loader = HDF5Loader(dataset.files[0].path, ("x",), 8, memory_bytes=6 * MIB, shuffle=shuffle, threads=1)
    size = sum(batch.size for batch in loader)
    use = resources(loader.order, dataset.row_bytes, 6 * MIB, 1, 1, 0)
    capacity = loader.order.mixing_chunks * int(loader.order.chunk_rows.max()) * dataset.row_bytes
    assert size == 640 and use.held_groups * capacity <= 6 * MIB and use.kept_bytes + use.cache_bytes <= 3 * MIB
    loader.close()
