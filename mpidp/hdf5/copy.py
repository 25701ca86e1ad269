"""Copies of the tree of an HDF5 file: groups, links, types, attributes, and whole datasets by HDF5's own H5Ocopy.

H5Ocopy keeps no hard links between its calls, and makes references null. So the tree is walked here, each object is
copied once and linked to from its other names, and references are made anew when all objects are there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from mpidp.errors import DataError

# H5O_COPY_MERGE_COMMITTED_DTYPE_FLAG, which h5py does not name: a named type stays one, however many datasets have it.
_MERGE_NAMED_TYPES = 0x0040

# Creates the dataset that is written anew in place of an open one: called with that, and the path, group and name.
Create = Callable[[Any, str, Any, str], Any]


@dataclass(frozen=True)
class Template:
    """An open HDF5 file to copy from.

    Attributes:
        file: an `h5py.File`.
        anew: datasets that are written anew: created with attributes, but without values.
        wanted: the only datasets that are taken, with the groups that they are in; () for everything.
        left: groups that are left out with all that is in them.
        expand_external: external links become copies of what they lead to, instead of links.
    """

    file: Any
    anew: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()
    expand_external: bool = False


class _NotCopiedError(Exception):
    """Why an attribute or a dataset cannot be in the new file."""


class TreeCopy:
    """One copying of what a template holds into `target`, an open file; `remarks` says what was not copied, and why."""

    def __init__(self, template: Template, target: Any, create: Create) -> None:
        self._source, self._target, self._template, self._create = template.file, target, template, create
        self._places = {identity(template.file.id): "/"}
        self._made: list[tuple[Any, Any, bool]] = [(template.file, target, True)]
        self._datasets: list[tuple[Any, Any, str, str]] = []
        self._links: list[str] = []
        self._external: list[tuple[Any, Any, str, str]] = []
        self._copy_list = h5py.h5p.create(h5py.h5p.OBJECT_COPY)
        self._copy_list.set_copy_object(_MERGE_NAMED_TYPES)
        self.remarks: list[str] = []

    def run(self) -> None:
        """Copy everything; raises `DataError` naming the object that cannot be read."""
        self._group(self._source, self._target, "")
        while self._external:  # after all that is here, which so has its own names
            group, into, name, way = self._external.pop(0)
            self._named(way, self._reach, group, into, name, way)
        referring: list[tuple[Any, Any, str, str]] = []
        for entry in self._datasets:  # now that there are all named types
            if entry[0].id.get_type().detect_class(h5py.h5t.REFERENCE):
                self._places[identity(entry[0].id)] = f"/{entry[3]}"
                referring.append(entry)
            else:
                self._named(entry[3], self._dataset, *entry)
        for entry in referring:  # and all objects
            self._named(entry[3], self._references, *entry)
        for item, made, is_new in self._made:
            self._named(made.name, self._attributes, item, made, is_new)
        if self._links:
            more = f" and {len(self._links) - 10:,} more" if len(self._links) > 10 else ""
            self.remarks.append(
                f"kept as links into other files, which are looked for from the new file's folder: "
                f"{', '.join(self._links[:10])}{more}; --expand-external copies what is there"
            )

    def _named(self, way: str, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function; its error names the object."""
        try:
            function(*arguments)
        except (DataError, _NotCopiedError):
            raise
        except Exception as error:  # h5py raises anything for a damaged object
            raise DataError(
                f'{self._source.filename}: "{way}" cannot be copied; mpidp data verify lists all that is damaged, and '
                f"--fields names datasets to convert without it. HDF5 says: {error}"
            ) from error

    def _group(self, group: Any, into: Any, path: str) -> None:
        for name in group:
            way = f"{path}/{name}".strip("/")
            if self._is_taken(way):
                self._named(way, self._link, group, into, name, way)

    def _is_taken(self, way: str) -> bool:
        wanted = self._template.wanted
        if way in self._template.left:
            return False
        return not wanted or any(each == way or each.startswith(f"{way}/") for each in wanted)

    def _link(self, group: Any, into: Any, name: str, way: str) -> None:
        """Copy a link, or what it leads to where that was asked for."""
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink) and not self._template.expand_external:
            into[name] = h5py.ExternalLink(link.filename, link.path)
            self._links.append(way)
        elif isinstance(link, h5py.ExternalLink):
            self._external.append((group, into, name, way))
        elif isinstance(link, h5py.SoftLink) and not self._template.wanted:
            into[name] = h5py.SoftLink(link.path)
        else:
            self._object(group[name], into, name, way)

    def _reach(self, group: Any, into: Any, name: str, way: str) -> None:
        self._object(group[name], into, name, way)

    def _object(self, item: Any, into: Any, name: str, way: str) -> None:
        key = identity(item.id)
        if isinstance(item, h5py.Dataset):  # one that has another name is linked to it when that is there
            self._datasets.append((item, into, name, way))
        elif key in self._places:
            into[name] = self._target[self._places[key]]
        elif isinstance(item, h5py.Group):
            self._places[key] = f"/{way}"
            made = h5py.Group(h5py.h5g.create(into.id, *link_name(name), item.id.get_create_plist()))
            self._made.append((item, made, True))
            self._group(item, made, way)
        else:
            self._places[key] = f"/{way}"  # a named type, which H5Ocopy would crash of if it is damaged
            kind = item.id.copy()
            kind.commit(into.id, *link_name(name))
            self._made.append((item, h5py.Datatype(kind), True))

    def _dataset(self, item: Any, into: Any, name: str, way: str) -> None:
        key = identity(item.id)
        if key in self._places:
            into[name] = self._target[self._places[key]]
            return
        self._places[key] = f"/{way}"
        if way in self._template.anew:
            self._made.append((item, self._create(item, way, into, name), True))
        else:
            self._copy_whole(item, into, name)

    def _copy_whole(self, item: Any, into: Any, name: str) -> None:
        text, link_list = link_name(name)
        h5py.h5o.copy(item.id, b".", into.id, text, self._copy_list, link_list)
        self._made.append((item, into[name], False))

    def type_of(self, kind: Any) -> Any:
        """Return a type of the source as it is in the target: a named type by its name."""
        if not kind.committed():
            return kind
        place = self._places.get(identity(kind))
        return kind.copy() if place is None else h5py.h5t.open(self._target.id, place.encode())

    def _references(self, item: Any, into: Any, name: str, way: str) -> None:
        """Copy a dataset of references."""
        if name in into:
            return
        kind = item.id.get_type()
        text, link_list = link_name(name)
        values = np.zeros(item.shape or (), item.dtype)
        if item.shape is not None:
            item.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        try:
            translated = self._translated(values)
        except _NotCopiedError as reason:
            self.remarks.append(f"{way}: left out, since it {reason}")
            return
        made = h5py.h5d.create(
            into.id, text, self.type_of(kind), item.id.get_space(), item.id.get_create_plist(), link_list
        )
        if item.shape is not None:
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, translated)
        self._made.append((item, h5py.Dataset(made), True))

    def _attributes(self, item: Any, made: Any, is_new: bool) -> None:
        """Copy attributes: all to a new object, else those that hold references, which H5Ocopy has made null."""
        lost: dict[str, list[str]] = {}
        for name in list(item.attrs):
            old = h5py.h5a.open(item.id, name.encode("utf-8", "surrogateescape"))
            refers = old.get_type().detect_class(h5py.h5t.REFERENCE)
            if not is_new and not refers:
                continue
            if not is_new:
                h5py.h5a.delete(made.id, name.encode("utf-8", "surrogateescape"))
            try:
                self._attribute(old, made, name.encode("utf-8", "surrogateescape"), refers)
            except _NotCopiedError as reason:
                lost.setdefault(str(reason), []).append(name)
        for why, names in lost.items():
            self.remarks.append(f"{made.name}: left out attributes, each of which {why}: {', '.join(names[:10])}")

    def _attribute(self, old: Any, made: Any, name: bytes, refers: bool) -> None:
        kind, space = old.get_type(), old.get_space()
        is_empty = space.get_simple_extent_type() == h5py.h5s.NULL
        if not is_empty and is_fixed_size(kind):
            values: Any = np.empty(old.shape, np.dtype((np.void, kind.get_size())))
            old.read(values, mtype=kind)
            h5py.h5a.create(made.id, name, self.type_of(kind), space).write(values, mtype=kind)
            return
        try:
            values = None if is_empty else np.zeros(old.shape, old.dtype)
        except TypeError:
            raise _NotCopiedError("has a type of variable size without NumPy equivalent") from None
        if values is not None:
            old.read(values)
            values = self._translated(values) if refers else values
        new = h5py.h5a.create(made.id, name, self.type_of(kind), space)
        if values is not None:
            new.write(values)

    def _translated(self, value: Any) -> Any:
        """Return values whose references lead to the same objects in the target."""
        if isinstance(value, h5py.h5r.RegionReference):
            raise _NotCopiedError("refers to regions of datasets")
        if isinstance(value, h5py.h5r.Reference):
            if not value:
                return value
            place = self._places.get(identity(h5py.h5r.dereference(value, self._source.id)))
            if place is None:
                raise _NotCopiedError("refers to what is not copied")
            return h5py.h5r.create(self._target.id, place.encode("utf-8", "surrogateescape"), h5py.h5r.OBJECT)
        if isinstance(value, np.ndarray) and value.dtype.names:
            for member in value.dtype.names:
                if value.dtype[member].hasobject:
                    value[member] = self._translated(value[member])
        elif isinstance(value, np.ndarray) and value.dtype.hasobject:
            for index in np.ndindex(value.shape):
                value[index] = self._translated(value[index])
        return value


def identity(item: Any) -> tuple[int, int]:
    """Return what identifies an open object (low-level) by any of its names: numbers of file and address."""
    info = h5py.h5o.get_info(item)
    return info.fileno, info.addr


def link_name(name: str) -> tuple[bytes, Any]:
    """Return a name as HDF5 takes it, and the properties of its link: UTF-8, as h5py writes names."""
    properties = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    properties.set_char_encoding(h5py.h5t.CSET_UTF8)
    return name.encode("utf-8", "surrogateescape"), properties


def is_fixed_size(kind: Any) -> bool:
    """Return whether values of a type of HDF5 lie in the dataset itself, and mean the same in another file."""
    if isinstance(kind, h5py.h5t.TypeCompoundID):
        return all(is_fixed_size(kind.get_member_type(number)) for number in range(kind.get_nmembers()))
    if isinstance(kind, h5py.h5t.TypeArrayID):
        return is_fixed_size(kind.get_super())
    if isinstance(kind, h5py.h5t.TypeStringID):
        return not kind.is_variable_str()
    return kind.get_class() not in (h5py.h5t.VLEN, h5py.h5t.REFERENCE)
