"""Change random bytes of HDF5 files of every format, and compare what the loader and h5py make of them.

One or two bytes of a small file are changed. Then the loader must give what h5py gives, or one `DataError` in one
line: no other exception, no hang, no other value. Children do it, since damage can end or hang HDF5 itself; if plain
h5py does as well, that is counted apart.

    python tests/faults/chaos_file.py --changes 1000
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.loader import HDF5Loader

ROWS, LIMIT_S, MOST_ROWS = 40, 20.0, 10_000
CHUNKED = {"chunks": (6, 4)}
FILTERED: dict[str, Any] = {**CHUNKED, "compression": "gzip", "shuffle": True}
GROWING = {**CHUNKED, "maxshape": (None, 4)}
# By name: bounds of the format, and how the dataset "x" lies in the file.
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "earliest, contiguous": ("earliest", {}),
    "earliest, B-tree": ("earliest", CHUNKED),
    "earliest, B-tree, filtered": ("earliest", {**FILTERED, "fletcher32": True}),
    "earliest, compact": ("earliest", {"compact": True}),
    "v108, contiguous": (("v108", "v108"), {}),
    "v108, B-tree, filtered": (("v108", "v108"), FILTERED),
    "v110, fixed array": (("v110", "v110"), CHUNKED),
    "v110, extensible array": (("v110", "v110"), GROWING),
    "v110, single chunk": (("v110", "v110"), {"chunks": (ROWS, 4)}),
    "latest, contiguous": ("latest", {}),
    "latest, fixed array, filtered": ("latest", FILTERED),
    "latest, extensible array, filtered": ("latest", {**GROWING, "compression": "lzf"}),
    "latest, compact": ("latest", {"compact": True}),
}
TABLE = np.dtype([("energy", "f4"), ("hits", "u2", (2,))])


def write(path: Path, name: str) -> None:
    """Write a file of a format: a dataset that lies as it says, booleans, and a table in a group."""
    libver, options = FORMATS[name]
    values = np.arange(ROWS * 4, dtype="f4").reshape(ROWS, 4) + 1
    with h5py.File(path, "w", libver=libver) as file:
        if options.get("compact"):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple(values.shape)
            h5py.Dataset(h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, plist))[...] = values
        else:
            file.create_dataset("x", data=values, **options)
        file["x"].attrs["units"] = "mm"
        file["flags"] = np.arange(ROWS) % 3 == 0
        table = np.zeros(ROWS, TABLE)
        table["energy"], table["hits"] = values[:, 0], values[:, :2]
        file["group/table"] = table


FIELDS: dict[str, tuple[str, str]] = {"x": ("x", ""), "flags": ("flags", ""), "energy": ("group/table", "energy")}


def changed(content: bytes, name: str, number: int) -> bytes:
    """Return the content with one or two bytes changed, which follow from the name of the format and the number."""
    choice = random.Random(f"{name} {number}")
    new = bytearray(content)
    for _ in range(choice.randint(1, 2)):
        new[choice.randrange(len(new))] ^= choice.randint(1, 255)
    return bytes(new)


def by_h5py(path: Path, field: str) -> np.ndarray | None:
    """Return what h5py reads, or None."""
    dataset, member = FIELDS[field]
    with suppress(Exception), h5py.File(path, "r", locking=False) as file:
        if file[dataset].shape and len(file[dataset]) <= MOST_ROWS and file[dataset].nbytes < 2**26:
            values = file[dataset][()]
            return values[member] if member else values
    return None


def by_loader(path: Path, field: str) -> np.ndarray:
    """Return what a loader gives in one epoch."""
    from mpidp.hdf5.field import FieldSpec

    dataset, member = FIELDS[field]
    with closing(
        HDF5Loader(path, [FieldSpec(dataset, name=field, member=member)], 4, shuffle="none", threads=1)
    ) as loader:
        if loader.num_samples > MOST_ROWS:
            raise DataError("more rows than this compares")
        return np.concatenate([batch[field].numpy().copy() for batch in loader])


def judge(path: Path, field: str, original: np.ndarray | None) -> str:
    """Return what comes of reading a field: "same", "as written", "refused", or "WRONG: " and how.

    "as written": h5py gives nothing, or fill values for a chunk that it does not find, and the loader what was written.
    """
    expected = by_h5py(path, field)
    try:
        found = by_loader(path, field)
    except DataError as error:
        return "refused" if "\n" not in str(error) else f"WRONG: more than a line: {error}"
    except BaseException as error:
        return f"WRONG: {type(error).__name__}: {error}"
    if expected is not None and _equal(found, expected):
        return "same"
    return "as written" if original is not None and _equal(found, original) else f"WRONG: {field} has other values"


def _equal(found: np.ndarray, expected: np.ndarray) -> bool:
    if found.shape != expected.shape:
        return False
    return bool(((found == expected) | ((found != found) & (expected != expected))).all())


def misspelt(path: Path) -> str:
    """Return what comes of asking for a field that is not there."""
    try:
        HDF5Loader(path, ["flogs"], 1).close()
    except DataError as error:
        return "refused" if "\n" not in str(error) else f"WRONG: more than a line: {error}"
    except BaseException as error:
        return f"WRONG: {type(error).__name__}: {error}"
    return "WRONG: a field that is not there"


def child(folder: Path, name: str, start: int, stop: int, plain: bool) -> None:
    """Write a line of JSON for each change: what was found; with `plain`, by h5py alone."""
    warnings.simplefilter("ignore")
    base = folder / "base.h5"
    originals = {field: by_h5py(base, field) for field in FIELDS}
    for number in range(start, stop):
        path = folder / f"{number}.h5"
        path.write_bytes(changed(base.read_bytes(), name, number))
        if plain:
            verdicts = [str(by_h5py(path, field) is None) for field in FIELDS] + [_seen_by_h5py(path)]
        else:
            verdicts = [judge(path, field, originals[field]) for field in FIELDS] + [misspelt(path)]
        print(json.dumps(verdicts), flush=True)
        path.unlink()


def _seen_by_h5py(path: Path) -> str:
    """List the file and its chunks, as the loader has to; whatever HDF5 says."""
    with suppress(Exception), h5py.File(path, "r", locking=False) as file:
        with suppress(Exception):
            file.visititems(lambda _, item: str(item) and None)
        with suppress(Exception):
            file["x"].id.chunk_iter(lambda _: None)
    return "seen"


def run_child(folder: Path, name: str, start: int, stop: int, plain: bool = False) -> list[list[str]]:
    """Return the verdicts of a child, fewer than asked for where it died or hung."""
    words = [str(folder), name, str(start), str(stop), str(int(plain))]
    command = [sys.executable, __file__, "--child", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S + 0.2 * (stop - start))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    return [json.loads(line) for line in output.splitlines() if line.endswith("]")]


def try_format(name: str, changes: int) -> tuple[Counter[str], list[str]]:
    """Return counts of what came of the changes to a file of one format, and what was wrong."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "base.h5", name)
        done = 0
        while done < changes:
            for number, verdicts in enumerate(run_child(folder, name, done, changes), done):
                counts.update(verdict.partition(":")[0] for verdict in verdicts)
                wrong += [f"{name}, change {number}: {text}" for text in verdicts if text.startswith("WRONG")]
                done = number + 1
            if done < changes:  # the child died of this change, or hung
                if run_child(folder, name, done, done + 1, plain=True):
                    wrong.append(f"{name}, change {done}: the loader's process died or hung, and that of h5py did not")
                counts["h5py dies, too"] += 1
                done += 1
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=1000, help="of each format")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, name, start, stop, plain = options.child
        child(Path(folder), name, int(start), int(stop), plain == "1")
        return
    bad: list[str] = []
    for name in FORMATS:
        counts, wrong = try_format(name, options.changes)
        print(f"{name}: {', '.join(f'{what} {count}' for what, count in sorted(counts.items()))}", flush=True)
        bad += wrong
    print("\n".join(bad) or f"{len(FORMATS)} formats, {options.changes} changes of each: nothing wrong")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
