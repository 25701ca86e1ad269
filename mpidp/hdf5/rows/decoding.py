"""Enters: a described data set. Leaves: in words, how its fields are decoded, and what is slow and why."""

from mpidp.hdf5.decode.filters import DEFLATE, inflater
from mpidp.hdf5.files.dataset import DataSet


def decoding(dataset: DataSet) -> str:
    """Return how the fields are decoded, in a few words."""
    if any(reason for file in dataset.files for reason in file.slow):
        return "partly by HDF5 itself"
    filters = {step for file in dataset.files for storage in file.storages if storage for step in storage.filters}
    if not filters:
        return "read as it is"
    names = sorted(inflater() if step.number == DEFLATE else step.name for step in filters)
    return f"decoded without HDF5 ({', '.join(dict.fromkeys(names))})"


def slow_paths(dataset: DataSet) -> list[str]:
    """Return a line for each dataset that only HDF5 can read, with the reason; one thread decodes it."""
    lines: dict[str, str] = {}
    for file in dataset.files:
        for field, reason in zip(dataset.fields, file.slow, strict=True):
            if reason:
                line = f'{file.path}: dataset "{field.dataset}" is read by HDF5, one thread at a time: {reason}'
                lines.setdefault(field.name, line)
    return list(lines.values())
