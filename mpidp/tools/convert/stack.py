"""A group that holds a group for each sample enters; one array for each dataset of the samples leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.copy import is_fixed_size
from mpidp.hdf5.files.contents import natural, walk
from mpidp.hdf5.files.types import HDF5_ERRORS, raw_block
from mpidp.hdf5.order.keyed import IntArray
from mpidp.printable import listed
from mpidp.tools.convert.source import SourceField


@dataclass(frozen=True)
class Stack:
    """Groups as rows, in natural order of their names: sample_2 before sample_10.

    `members` are the paths in each group, by the name of the dataset that they become.
    """

    file: Any
    path: str
    groups: tuple[str, ...]
    members: Mapping[str, str]
    texts: Mapping[str, Sequence[str]]
    remarks: tuple[str, ...]

    @property
    def fields(self) -> list[SourceField]:
        """The datasets that they become."""
        return [self._field(name) for name in self.members]

    def take(self, name: str, rows: IntArray) -> npt.NDArray[Any]:
        """Return one dataset of some of the groups."""
        field = self._field(name)
        values = np.empty((len(rows), *field.shape), field.dtype)
        for place, row in enumerate(rows.tolist()):
            member = f"{self.groups[row]}/{self.members[name]}"
            try:
                values[place] = raw_block(self.file[member], (0,) * len(field.shape), field.shape)
            except HDF5_ERRORS as error:
                raise DataError(f'{self.path}: dataset "{member}" cannot be read. HDF5 says: {error}') from error
        return values

    def _field(self, name: str) -> SourceField:
        first = f"{self.groups[0]}/{self.members[name]}"
        kind = self.file[first].id.get_type()
        dtype = np.dtype((np.void, kind.get_size()))
        return SourceField(
            name, len(self.groups), self.file[first].shape, dtype, type_name=_type_name(self.file[first]), like=first
        )


def stack_of(file: Any, path: str, group_path: str) -> Stack:
    """Return the groups in a group of an open file as rows.

    Raises:
        DataError: they hold different datasets, or such of different shapes or types, named with both.
    """
    base = group_path.strip("/")
    group = file.get(base) if base else file
    names = sorted((name for name in group if _is_group(group, name)), key=natural) if _is_container(group) else []
    if not names:
        raise DataError(f'{path}: "{group_path}" is no group that holds groups; give the path of one, or /')
    groups = tuple(f"{base}/{name}".strip("/") for name in names)
    first = _datasets(file, path, groups[0])
    for each in groups[1:]:
        _check_same(path, groups[0], first, each, _datasets(file, path, each))
    kept = {name: item for name, item in first.items() if item.shape is not None and is_fixed_size(item.id.get_type())}
    left = [f"{name} ({_type_name(item)})" for name, item in first.items() if name not in kept]
    attributes = sorted({name for each in groups for name in file[each].attrs})
    remarks = [f"left out of each group, since its size varies: {listed(left)}"] if left else []
    if attributes:
        remarks.append(f"left out attributes of the {len(groups):,} groups: {listed(attributes)}")
    members = {f"{base}/{name}".strip("/"): name for name in kept}
    return Stack(file, path, groups, members, {f"{base}/group_names".strip("/"): names}, tuple(remarks))


def _check_same(path: str, first: str, wanted: dict[str, Any], other: str, found: dict[str, Any]) -> None:
    for name in sorted(wanted.keys() ^ found.keys()):
        has, lacks = (first, other) if name in wanted else (other, first)
        raise DataError(f'{path}: "{has}" has a dataset "{name}", "{lacks}" has none; groups must agree to be stacked')
    for name, item in wanted.items():
        facts = [(each.shape, _type_name(each)) for each in (item, found[name])]
        if facts[0][0] != facts[1][0] or not item.id.get_type().equal(found[name].id.get_type()):
            here, there = (f"{kind} of shape {shape}" for shape, kind in facts)
            raise DataError(
                f'{path}: "{first}/{name}" is {here}, "{other}/{name}" is {there}; groups must agree to be stacked, so '
                "bring all to one shape first"
            )


def _datasets(file: Any, path: str, group: str) -> dict[str, Any]:
    tree = walk(file[group])
    if tree.damaged:
        name, text = tree.damaged[0]
        raise DataError(f'{path}: "{group}/{name}" {text}')
    return {name: file[f"{group}/{name}"] for name in tree.datasets}


def _is_container(item: Any) -> bool:
    return hasattr(item, "visititems")


def _is_group(group: Any, name: str) -> bool:
    return _is_container(group.get(name)) and not hasattr(group.get(name, getlink=True), "path")


def _type_name(dataset: Any) -> str:
    try:
        return str(dataset.dtype)
    except TypeError:
        return "a type without NumPy equivalent"
