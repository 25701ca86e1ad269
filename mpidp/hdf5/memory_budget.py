"""The memory that reading may use, and the kind of order, streams and mixing depth that follow from it.

The latter decide which samples form a batch, so they follow from the data, the global batch and what one node has,
never from the number of ranks.
"""

import math
from dataclasses import dataclass

from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.gather import number_of_slots
from mpidp.hdf5.order import Order, Shuffle
from mpidp.hdf5.plan import automatic_streams
from mpidp.hdf5.read import CACHE_BYTES, LARGE_ROW_BYTES, reads_single_rows

MOST_NODE_BYTES = 2 * 2**30
_NODE_SHARE = 8
_LEAST_STREAMS = 8
_ENOUGH_CHUNKS = 8
_MOST_MIXING_CHUNKS = 4
_FEW_ROWS = 4
_FEW_BATCHES = 4
_WORTH_SEEKING_BYTES = 2**20


def default_node_bytes(node_memory: int | None) -> int:
    """Return how much of a node's memory the decoded rows of a loader may take: an eighth, at most 2 GiB."""
    return MOST_NODE_BYTES if node_memory is None else min(MOST_NODE_BYTES, node_memory // _NODE_SHARE)


def choose_shuffle(dataset: DataSet) -> Shuffle:
    """Return "full" where samples can be read one by one at next to no cost, else "streams", which reads whole chunks.

    That is so for large samples (from 64 KiB on) with a chunk each, encoded or not; and for large samples that lie in
    the file as they are, if a chunk has at most four of them or a sample is 1 MiB, so that seeking costs little.
    """
    chunk_rows = int(dataset.chunk_rows.max())
    seeks_cost_little = chunk_rows <= _FEW_ROWS or dataset.row_bytes >= _WORTH_SEEKING_BYTES
    alone = chunk_rows == 1 or (seeks_cost_little and _reads_single_rows(dataset))
    return "full" if dataset.row_bytes >= LARGE_ROW_BYTES and alone else "streams"


def choose_mixing(
    dataset: DataSet, node_bytes: int, streams: int | None, mixing_chunks: int | None, global_batch: int = 64
) -> tuple[int, int]:
    """Return streams and mixing depth whose groups take up to half of `node_bytes`; those that are given stand.

    Depth gives way first: many streams of which each mixes one chunk mix better than few that mix four. Chunks of large
    samples (from 64 KiB on) are not mixed in a stream, and those of all streams together hold at most four batches,
    though there are eight streams if `node_bytes` allows.
    """
    is_large = dataset.row_bytes >= LARGE_ROW_BYTES
    if mixing_chunks is None:
        enough = min(_LEAST_STREAMS, dataset.num_rows) if streams is None else streams
        depths = range(1 if is_large else _MOST_MIXING_CHUNKS, 0, -1)
        fits = (depth for depth in depths if enough * depth * dataset.mean_chunk_bytes <= node_bytes / 2)
        mixing_chunks = next(fits, 1)
    if streams is None:
        most_bytes = node_bytes // 2
        if is_large:
            group_bytes = math.ceil(mixing_chunks * dataset.mean_chunk_bytes)
            few_bytes = _FEW_BATCHES * global_batch * dataset.row_bytes
            # More streams than a batch has samples would hold more, and mix its samples no better.
            most_bytes = min(most_bytes, max(min(few_bytes, global_batch * group_bytes), _LEAST_STREAMS * group_bytes))
        streams = automatic_streams(dataset.num_rows, dataset.mean_chunk_bytes, mixing_chunks, most_bytes)
    return streams, mixing_chunks


def first_batch_bytes(order: Order, dataset: DataSet) -> int:
    """Return about how many bytes of rows, as in memory, all ranks together read before the first batch is complete."""
    chunk_rows = dataset.num_rows / len(dataset.chunk_rows)
    if order.shuffle == "streams":
        of_stream, group_rows = order.global_batch / order.streams, order.mixing_chunks * chunk_rows
        rows = min(order.streams, order.global_batch) * math.ceil(of_stream / group_rows) * group_rows
    elif _reads_single_rows(dataset):
        rows = order.global_batch
    elif order.shuffle == "full":
        rows = order.global_batch * chunk_rows
    else:
        rows = math.ceil(order.global_batch / chunk_rows) * chunk_rows
    return dataset.row_bytes * min(math.ceil(rows), order.num_samples)


def _reads_single_rows(dataset: DataSet, most_cache_bytes: int = CACHE_BYTES) -> bool:
    return all(reads_single_rows(dataset, file, most_cache_bytes) for file in range(len(dataset.files)))


@dataclass(frozen=True)
class Resources:
    """What a rank may use to read: threads that decode, decoded groups, and bytes of decoded chunks and blocks."""

    threads: int
    held_groups: int
    kept_bytes: int
    cache_bytes: int


def resources(order: Order, row_bytes: int, rank_bytes: int, threads: int, size: int, rank: int) -> Resources:
    """Return what `rank` of `size`, which may hold `rank_bytes`, uses."""
    # At the end of an epoch all streams need their next group at once; there is room for one more in any case.
    slots = number_of_slots(order.streams, size, rank)
    group_bytes = max(1, order.mixing_chunks * int(order.chunk_rows.max()) * row_bytes)
    reserve = min(threads + slots, int(rank_bytes * 0.6) // group_bytes - slots)
    return Resources(threads, slots + max(1, reserve), kept_bytes(rank_bytes), cache_bytes(rank_bytes))


def most_rows(order: Order, size: int) -> int:
    """Return the most samples that a rank of `size` has in a step."""
    if order.shuffle != "streams":
        return -(-order.global_batch // size)
    streams = math.ceil(order.streams / size)
    places = math.ceil(order.global_batch / order.streams)
    sharers = max(1, size // order.streams)  # of the stream that the fewest ranks share
    return streams * math.ceil(places / sharers)


def warnings_about(order: Order, dataset: DataSet, rank_bytes: int, size: int) -> list[str]:
    """Return what a user should know of this order on these files, with figures; one text each."""
    facts = order, dataset, rank_bytes, size
    found = [_little_mixing(order), _repeated_decoding(*facts), _too_large(*facts)]
    return [f"{dataset.files[0].path}: {text}" for text in found if text]


def chunks_in_a_batch(order: Order) -> float:
    """Return about how many different chunks the samples of a global batch come from, in order "streams"."""
    places = order.global_batch / order.streams  # samples of a stream
    chunk_rows = order.num_samples / len(order.chunk_rows)
    # A group mixes its chunks; a batch that is longer than a group goes through several.
    of_stream = max(min(places, order.mixing_chunks), places / chunk_rows)
    return min(order.streams * of_stream, order.global_batch, len(order.chunk_rows))


def _little_mixing(order: Order) -> str:
    mixed = chunks_in_a_batch(order)
    if order.shuffle != "streams" or mixed >= min(_ENOUGH_CHUNKS, order.global_batch / 4, len(order.chunk_rows) / 4):
        return ""
    window = round(order.streams * order.mixing_chunks * order.num_samples / len(order.chunk_rows))
    return (
        f"a batch of {order.global_batch} comes from about {mixed:.0f} of {len(order.chunk_rows)} chunks "
        f"({order.streams} streams of {order.mixing_chunks} chunks, about {window} samples mixed), which shows in "
        'training if neighbours in the file are alike: give more streams, more memory_bytes, or shuffle="full"'
    )


def amplification(order: Order, dataset: DataSet, rank_bytes: int, size: int) -> float:
    """Return how many bytes are decoded in an epoch for each byte that is used, over all ranks."""
    factors = [_field_factor(dataset, number, rank_bytes) for number in range(len(dataset.fields))]
    weights = [field.row_bytes for field in dataset.fields]
    base = sum(factor * weight for factor, weight in zip(factors, weights, strict=True)) / sum(weights)
    if order.shuffle == "streams":
        return base * max(1.0, size / order.streams)
    chunked = any(file.chunked for file in dataset.files)
    whole = chunked and not _reads_single_rows(dataset, cache_bytes(rank_bytes))
    decoded_bytes = dataset.num_rows * dataset.row_bytes
    if order.shuffle == "full" and whole and decoded_bytes > kept_bytes(rank_bytes):
        return max(base, order.num_samples / len(order.chunk_rows))
    return base


def _field_factor(dataset: DataSet, number: int, rank_bytes: int) -> float:
    """Return how often a field's chunks are decoded where they are taller than the ranges that are read."""
    rows = decoded = 0
    for file in dataset.files:
        storage = file.storages[number]
        rows += file.num_rows
        decoded_whole = storage is not None and storage.chunked and not storage.is_raw
        taller = decoded_whole and storage is not None and storage.block_rows > file.range_rows
        again = taller and storage is not None and storage.block_bytes > cache_bytes(rank_bytes)
        decoded += file.num_rows * (-(-storage.block_rows // file.range_rows) if again and storage else 1)
    return decoded / rows


def kept_bytes(rank_bytes: int) -> int:
    """Return how many bytes of decoded chunks a rank keeps that may hold `rank_bytes`."""
    return min(256 * 2**20, rank_bytes // 4)


def cache_bytes(rank_bytes: int) -> int:
    """Return how many bytes of decoded blocks that serve several ranges such a rank keeps."""
    return min(CACHE_BYTES, rank_bytes // 8)


def _repeated_decoding(order: Order, dataset: DataSet, rank_bytes: int, size: int) -> str:
    factor = amplification(order, dataset, rank_bytes, size)
    if factor < 2:
        return ""
    rows = dataset.num_rows // len(dataset.chunk_rows)
    cause, advice = "a chunk is larger than what is read at once", "write it with smaller chunks (mpidp data convert)"
    if order.shuffle == "full":
        cause = f"a chunk of about {rows} rows is decoded for each row"
        advice = 'shuffle="streams" decodes each chunk once, or ' + advice
    elif order.shuffle == "streams" and size >= 2 * order.streams:
        cause, advice = (
            f"{size} ranks share {order.streams} streams",
            'give more streams, smaller chunks, or mode="node"',
        )
    return f"{factor:.0f} bytes are decoded for each byte used, because {cause}; {advice}"


def _too_large(order: Order, dataset: DataSet, rank_bytes: int, size: int) -> str:
    if order.shuffle != "streams":
        return ""
    group_bytes = order.mixing_chunks * int(order.chunk_rows.max()) * dataset.row_bytes
    needed = (number_of_slots(order.streams, size, 0) + 1) * group_bytes
    if needed <= rank_bytes:
        return ""
    return (
        f"{order.streams} streams of {order.mixing_chunks} chunks need {needed / 2**20:.0f} MiB on a rank, more than "
        f"its share of {rank_bytes / 2**20:.0f} MiB; give fewer streams, or write the file with smaller chunks "
        "(mpidp data convert)"
    )
