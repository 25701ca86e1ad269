"""The path of an HDF5 file enters; a text leaves: its datasets, what the loader would make of them, and advice.

Behind `mpidp data inspect`.
"""

import warnings
from collections import defaultdict

from mpidp.errors import DataError
from mpidp.hdf5.files.dataset import DataSet
from mpidp.hdf5.files.describe import absolute_paths, describe
from mpidp.hdf5.files.listing import DatasetInfo, list_datasets
from mpidp.tools.inspect.advice import advice
from mpidp.tools.inspect.amplification import Order, StoredField, amplification
from mpidp.tools.inspect.loader_facts import loader_facts
from mpidp.tools.table import size_text, table

_ORDERS: tuple[Order, ...] = ("lanes", "full", "none")


def inspect(path: str) -> str:
    """Describe the file; raises `DataError` if it cannot be opened as HDF5."""
    info = list_datasets(path)
    if not info.datasets:
        return f"{path}\n  no datasets"
    parts = [path + _attributes_text(info.attributes), _datasets_text(info.datasets)]
    for dataset in info.datasets:
        if dataset.attributes:
            parts.append(f"{dataset.name}{_attributes_text(dataset.attributes)}")
    return "\n\n".join([*parts, _loader_text(path, info.datasets)])


def _attributes_text(attributes: dict[str, str]) -> str:
    return "".join(f"\n  {name}: {text}" for name, text in attributes.items())


def _datasets_text(datasets: tuple[DatasetInfo, ...]) -> str:
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
        for dataset in datasets
    ]
    return table(header, rows)


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


def _loader_text(path: str, datasets: tuple[DatasetInfo, ...]) -> str:
    """Say which datasets can be fields of one run, and how the loader would read them."""
    (path,) = absolute_paths(path)
    by_rows: dict[int, list[str]] = defaultdict(list)
    remarks: list[str] = []
    for dataset in datasets:
        try:
            found = _describe(path, [dataset.name], remarks)
            by_rows[found.num_rows].append(dataset.name)
        except DataError as error:
            remarks.append(str(error).removeprefix(f"{path}: "))
    texts = [_fields_text(_describe(path, names, []), datasets) for names in by_rows.values()]
    if remarks:
        texts.append("\n".join(["remarks", *(f"  {remark}" for remark in remarks)]))
    better = advice(path, datasets)
    if better:
        texts.append("\n".join(["advice", *(f"  {line}" for line in better)]))
    return "\n\n".join(texts)


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
