"""An HDF5 file as the source of a conversion: its datasets, to be written with other chunks and filters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.copy import Template, identity, is_fixed_size
from mpidp.hdf5.files.contents import Tree, natural, too_large, virtual_gaps, walk
from mpidp.hdf5.files.file import Facts, inspect, open_file
from mpidp.hdf5.files.types import HDF5_ERRORS, damage_told, fill_bytes, raw_block
from mpidp.hdf5.plan import IntArray
from mpidp.printable import listed
from mpidp.tools.data.source import Source, SourceField, Values


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


# Where there are no chunks, so much is read at a time.
_SPAN_BYTES = 4 << 20
_CACHE_BYTES = 8 << 20


class HDF5Source(Source):
    """Datasets of one HDF5 file; those with rows are written anew, as the bytes they are, others are copied whole.

    Args:
        path: the file.
        fields: the only datasets to take; () for everything that is in the file.
        expand_external: whether to copy what lies in other files.
        stack: a group whose groups are rows: their datasets of equal names become one; None for none.
    """

    def __init__(
        self, path: str, fields: Sequence[str], expand_external: bool = False, stack: str | None = None
    ) -> None:
        self._path, self._expand = path, expand_external
        self._remarks: list[str] = []
        self._file = open_file(path, _CACHE_BYTES)
        try:
            with damage_told(path):
                self._choose(fields, stack)
        except BaseException:
            self.close()
            raise

    def _choose(self, fields: Sequence[str], stack: str | None) -> None:
        """Find out what to write anew, and check it."""
        tree = self._tree(fields)
        self._stack = None if stack is None else stack_of(self._file, self._path, stack)
        self._wanted = tuple(name.strip("/") for name in fields)
        self._datasets: dict[str, Any] = {}
        whole: list[str] = []
        types: dict[str, str] = {}
        for name in self._wanted or self._names(tree):
            facts = self._facts(name)
            dataset = self._file[name]
            if self._wanted and identity(dataset.id) in (identity(each.id) for each in self._datasets.values()):
                continue  # another name of the same object becomes a link to it
            if name not in tree.internal and _has_rows(dataset):
                self._check(dataset, name, facts)
                self._datasets[name], types[name] = dataset, facts.type_name
            else:
                whole.append(name)
        if whole:
            self._remarks.append(f"copied as they are: {listed(whole)}")
        self._remarks += [f"{name} is {what}, and stays one" for name, what in tree.sparse[:10]]
        self._fields = [self._field(name, types[name]) for name in self._datasets]
        if self._stack:
            self._fields += self._stack.fields
            self._remarks += self._stack.remarks

    @property
    def fields(self) -> tuple[SourceField, ...]:
        """The datasets that are written anew."""
        return tuple(self._fields)

    def take(self, names: Sequence[str], rows: IntArray) -> Values:
        """Return the rows; each stretch of the file that holds some of them is read once."""
        return {name: self._take(self._datasets[name], name, rows) for name in names if name in self._datasets} | {
            name: self._stack.take(name, rows) for name in names if name not in self._datasets and self._stack
        }

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def template(self) -> Template:
        """This file."""
        left = self._stack.groups if self._stack else ()
        return Template(self._file, tuple(self._datasets), self._wanted, frozenset(left), self._expand)

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """The names of the groups that became rows."""
        return self._stack.texts if self._stack else {}

    @property
    def remarks(self) -> Sequence[str]:
        """What is not written anew."""
        return self._remarks

    def _tree(self, fields: Sequence[str]) -> Tree:
        tree = walk(self._file)
        if fields:
            return tree
        if tree.damaged:
            found = "; ".join(f'"{name}" {text}' for name, text in tree.damaged[:10])
            raise DataError(
                f"{self._path}: {len(tree.damaged)} damaged, {found}; name the datasets to convert by --fields"
            )
        if not tree.datasets and not tree.links:
            raise DataError(f"{self._path}: holds no datasets; give another file")
        return tree

    def _names(self, tree: Tree) -> list[str]:
        """Return the datasets to take where none are named: not those that stay links, nor those that are stacked."""
        skipped = tuple(f"{name}/" for name in (self._stack.groups if self._stack else ()))
        if self._stack is None:
            for path, groups in tree.stacks.items():
                self._remarks.append(
                    f'"{path or "/"}" holds {len(groups):,} groups, {listed(groups, most=3)}; if each is a sample, '
                    f"--stack-groups={path or '/'} makes one dataset for each field of them"
                )
        here = [name for name in tree.datasets if not (skipped and name.startswith(skipped))]
        home = identity(self._file.id)[0]
        return here if self._expand else [name for name in here if identity(self._file[name].id)[0] == home]

    def _facts(self, name: str) -> Facts:
        where = f'{self._path}: dataset "{name}"'
        with damage_told(self._path, name):
            facts = inspect(self._file, name)
            is_elsewhere = identity(self._file[name].id)[0] != identity(self._file.id)[0]
        elsewhere = "reached by an external link" if is_elsewhere else facts.elsewhere
        is_own = elsewhere.endswith(" over .")  # a virtual dataset over datasets of its own file
        if elsewhere and not is_own and not self._expand:
            raise DataError(
                f"{where} is {elsewhere}; --expand-external copies what external files hold, and --fields names "
                "datasets to convert without it"
            )
        return facts

    def _check(self, dataset: Any, name: str, facts: Facts) -> None:
        where = f'{self._path}: dataset "{name}"'
        if facts.unknown_filters:
            raise DataError(
                f"{where} is compressed with filter {', '.join(facts.unknown_filters)}, which this HDF5 library does "
                "not know; pip install hdf5plugin"
            )
        if damage := too_large(dataset):
            raise DataError(f"{where} is damaged: {damage}")
        if gaps := facts.unwritten or virtual_gaps(dataset):
            verb = "were" if gaps.endswith("chunks") and not gaps.startswith("1 ") else "was"
            raise DataError(
                f"{where}: {gaps} {verb} never written or is missing, and would be converted as fill values; "
                "repair the file, or name other datasets by --fields"
            )

    def _field(self, name: str, type_name: str) -> SourceField:
        dataset = self._datasets[name]
        dtype = np.dtype((np.void, dataset.id.get_type().get_size()))
        height = dataset.chunks[0] if dataset.chunks else 1
        fill = fill_bytes(dataset)
        return SourceField(name, dataset.shape[0], dataset.shape[1:], dtype, height, type_name, name, fill)

    def _take(self, dataset: Any, name: str, rows: IntArray) -> npt.NDArray[Any]:
        row_bytes = max(1, dataset.id.get_type().get_size() * int(np.prod(dataset.shape[1:], dtype=np.int64)))
        values = np.empty((len(rows), *dataset.shape[1:]), np.dtype((np.void, dataset.id.get_type().get_size())))
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        height = dataset.chunks[0] if dataset.chunks else max(1, _SPAN_BYTES // row_bytes)
        cuts = np.flatnonzero(np.diff(ordered // height)) + 1
        for places, wanted in zip(np.split(order, cuts), np.split(ordered, cuts), strict=True):
            first, last = int(wanted[0]), int(wanted[-1])
            rest = dataset.shape[1:]
            try:
                block = raw_block(dataset, (first, *(0,) * len(rest)), (last - first + 1, *rest))
            except HDF5_ERRORS as error:
                raise DataError(
                    f'{self._path}: dataset "{name}", rows {first} to {last} cannot be read; mpidp data verify '
                    f"{self._path} lists all that is damaged. HDF5 says: {error}"
                ) from error
            values[places] = block[wanted - first]
        return values


def _has_rows(dataset: Any) -> bool:
    """Return whether a dataset has rows of fixed size; text of any length, single values and the like have not."""
    return bool(dataset.shape) and 0 not in dataset.shape and is_fixed_size(dataset.id.get_type())
