"""The path of an HDF5 file enters; a text leaves: its datasets, what the loader would make of them, and advice.

Behind `mpidp data inspect`.
"""

import warnings
from collections import defaultdict

from mpidp.errors import DataError
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.files.contents import DatasetInfo, FileInfo, list_datasets
from mpidp.hdf5.files.describe import absolute_paths, describe
from mpidp.printable import listed
from mpidp.tools.inspect.advice import advice, stack_advice
from mpidp.tools.inspect.amplification import Order, StoredField, amplification
from mpidp.tools.inspect.loader_facts import loader_facts
from mpidp.tools.table import size_text, table

_ORDERS: tuple[Order, ...] = ("lanes", "full", "none")
_MOST_NAMED = 10


def inspect(path: str) -> tuple[str, bool]:
    """Describe the file; return the text, and whether nothing in it is damaged.

    Raises `DataError` if it cannot be opened as HDF5.
    """
    info = list_datasets(path)
    parts = [path + _attributes_text(info.attributes)]
    if info.datasets:
        parts.append(_datasets_text(info))
    else:
        parts[0] += "\n  no datasets"
    for dataset in info.datasets:
        if dataset.attributes:
            parts.append(f"{dataset.name}{_attributes_text(dataset.attributes)}")
    damaged = [f'{path}: "{name}" {text}' for name, text in info.tree.damaged]
    loader = _loader_text(path, info, damaged)
    parts.append(_section("links", [f"{name} leads to {where}" for name, where in info.tree.links]))
    parts.append(loader)
    parts.append(_section("damaged", damaged))
    return "\n\n".join(part for part in parts if part), not damaged


def _section(title: str, lines: list[str]) -> str:
    """Return lines under a title, at most ten of them; "" for none."""
    more = [f"and {len(lines) - _MOST_NAMED:,} more"] if len(lines) > _MOST_NAMED else []
    return "\n".join([title, *(f"  {line}" for line in [*lines[:_MOST_NAMED], *more])]) if lines else ""


def _attributes_text(attributes: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {text}" for name, text in attributes.items())


def _datasets_text(info: FileInfo) -> str:
    header = ("dataset", "shape", "dtype", "layout", "chunk", "chunks", "filters", "stored", "raw", "ratio")
    rows = [
        (
            dataset.name,
            "no dataspace" if dataset.facts.shape is None else _shape_text(dataset.facts.shape),
            dataset.facts.type_name,
            dataset.layout,
            _shape_text(dataset.facts.chunks) if dataset.facts.chunks else "-",
            dataset.num_chunks or "-",
            " ".join(dataset.filters) or "-",
            size_text(dataset.stored_bytes),
            size_text(dataset.raw_bytes),
            f"{dataset.raw_bytes / dataset.stored_bytes:.2f}" if dataset.stored_bytes else "-",
        )
        for dataset in info.datasets
    ]
    return table(header, rows) + (f"\n  and {info.num_more:,} more datasets" if info.num_more else "")


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


def _loader_text(path: str, info: FileInfo, damaged: list[str]) -> str:
    """Say which datasets can be fields of one run, and how the loader would read them; add to `damaged`."""
    (full,) = absolute_paths(path)
    by_rows: dict[int, list[str]] = defaultdict(list)
    remarks = _remarks(info)
    candidates = tuple(dataset for dataset in info.datasets if dataset not in info.samples)
    for dataset in candidates:
        try:
            found = _describe(full, [dataset.name], remarks)
            by_rows[found.num_rows].append(dataset.name)
        except DataError as error:
            if "file may be damaged" in str(error):
                damaged.append(str(error))
            else:
                remarks.append(str(error).removeprefix(f"{full}: "))
    texts = [_fields_text(_describe(full, names, []), candidates) for names in by_rows.values()]
    texts.append(_section("remarks", remarks))
    texts.append(_section("advice", [*stack_advice(path, info.tree.stacks), *advice(path, candidates)]))
    return "\n\n".join(text for text in texts if text)


def _remarks(info: FileInfo) -> list[str]:
    """Return what a user should know of datasets that are no fields."""
    remarks = [f"{name} {text}" for name, text in info.tree.dangling]
    for name, what in info.tree.sparse:
        remarks.append(f"{name} is {what}: no field; write it as one dataset of rows, dense, to train on it")
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, what in info.tree.internal.items():
        if "sparse" not in what:
            kinds[what].append(name)
    remarks += [f"{listed(names)}: {what}, no field" for what, names in kinds.items()]
    return remarks


def _describe(path: str, names: list[str], remarks: list[str]) -> DataSet:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = describe(path, names)
    remarks += [str(warning.message).removeprefix(f"{path}: ") for warning in caught]
    return found


def _fields_text(found: DataSet, datasets: tuple[DatasetInfo, ...]) -> str:
    names = ", ".join(f'"{field.name}"' for field in found.fields)
    lines = [f"data.fields = [{names}] would give", *loader_facts(found)]
    by_name = {dataset.name: dataset.facts for dataset in datasets}
    stored = [
        StoredField(facts.shape, facts.chunks, facts.dtype.itemsize)
        for facts in (by_name[field.name] for field in found.fields)
        if facts.shape and facts.dtype is not None
    ]
    if stored:
        range_rows = found.files[0].range_rows
        ratios = ", ".join(f"{order} {amplification(stored, range_rows, order):.1f}" for order in _ORDERS)
        lines.append(f"  decoded   bytes for each byte used, if nothing is kept: {ratios}")
    return "\n".join(lines)
