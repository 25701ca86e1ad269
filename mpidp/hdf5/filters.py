"""Undoing the filters of a chunk without HDF5, whose lock lets only one thread of a process decode at a time.

Inflating and the other codecs are imagecodecs' (libdeflate, measured fastest of five, benchmarks/loader.md), which
releases Python's lock; without it deflate is left to `zlib`, and the other codecs to HDF5.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Filter

imagecodecs: Any
try:
    import imagecodecs
except ImportError:
    imagecodecs = None

Bytes = npt.NDArray[np.uint8]
Undo = Callable[[Any, tuple[int, ...], Bytes], Bytes]

# Numbers that the HDF Group gave them.
DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD = 32000, 32001, 32004, 32008, 32015
# Some plugins register a sentence as their name.
NAMES = {LZF: "lzf", BLOSC: "blosc", LZ4: "lz4", BITSHUFFLE: "bitshuffle", ZSTD: "zstd"}
_PADDING = 64


def obstacle(filters: Sequence[Filter]) -> str:
    """Return why these filters cannot be undone without HDF5, or ""."""
    for step in filters:
        if step.number not in _UNDO:
            return f"filter {step.name} is undone by HDF5 only"
        if imagecodecs is None and step.number not in (DEFLATE, SHUFFLE):
            return f"filter {step.name} needs imagecodecs: pip install imagecodecs"
        if step.number == BITSHUFFLE and (len(step.values) > 4 and step.values[4] not in (0, 2, 3)):
            return f"filter {step.name} with compression {step.values[4]} is undone by HDF5 only"
    return ""


def inflater() -> str:
    """Return the name of the library that undoes deflate."""
    return "zlib" if imagecodecs is None else "libdeflate"


class Scratch:
    """Two buffers of one thread, kept between chunks, between which filters are undone."""

    def __init__(self) -> None:
        self._buffers: list[Bytes] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._turn = 0

    def buffer(self, num_bytes: int) -> Bytes:
        """Return room for `num_bytes`; the buffer returned before stays untouched, the one before that does not."""
        self._turn = 1 - self._turn
        if len(self._buffers[self._turn]) < num_bytes:
            self._buffers[self._turn] = np.empty(num_bytes + num_bytes // 8 + _PADDING, np.uint8)
        return self._buffers[self._turn][:num_bytes]


def undo(raw: Any, filters: Sequence[Filter], mask: int, num_bytes: int, scratch: Scratch, into: Bytes | None) -> Bytes:
    """Return the `num_bytes` values of a chunk whose stored bytes are `raw`.

    `mask` has bit i set where filter i was skipped. The result lies in `into` if given (`num_bytes` long), else
    in memory of `scratch`, or is `raw` itself where there was nothing to undo.

    Raises `DataError` for a checksum that differs and for bytes that cannot be decoded.
    """
    data: Any = raw
    for step, added, last in _backwards(tuple(filters), mask):
        if step.number == FLETCHER32:
            data = _without_checksum(data)
            continue
        out = into if into is not None and last else scratch.buffer(num_bytes + added)
        try:
            data = _UNDO[step.number](data, step.values, out)
        except DataError:
            raise
        except Exception as error:  # each codec has an exception class of its own
            raise DataError(f"filter {step.name} cannot be undone ({error})") from error
    values = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if len(values) != num_bytes:
        raise DataError(f"a chunk of {num_bytes} bytes decodes to {len(values)}")
    if into is not None and values.ctypes.data != into.ctypes.data:
        into[:] = values
        return into
    return values


@lru_cache
def _backwards(filters: tuple[Filter, ...], mask: int) -> tuple[tuple[Filter, int, bool], ...]:
    """Return the steps to undo: filter, bytes that checksums applied before it had added, whether it is the last."""
    applied = [step for number, step in enumerate(filters) if not mask >> number & 1]
    # Elements of one byte are shuffled into themselves.
    steps = [step for step in applied if (step.number, step.values[:1]) != (SHUFFLE, (1,))]
    earlier = [steps[:place] for place in range(len(steps))]
    added = [4 * sum(step.number == FLETCHER32 for step in before) for before in earlier]
    return tuple((step, more, not before) for step, more, before in zip(steps, added, earlier, strict=True))[::-1]


def _without_checksum(data: Any) -> Any:
    view = memoryview(data)
    if len(view) < 4:
        raise DataError(f"{len(view)} bytes end before their checksum")
    stored = struct.unpack("<I", view[-4:])[0]
    found = imagecodecs.h5checksum_fletcher32(view[:-4])
    if stored != found:
        raise DataError(f"checksum fletcher32 is {found:#010x}, stored was {stored:#010x}")
    return view[:-4]


def _inflate(data: Any, values: tuple[int, ...], out: Bytes) -> Bytes:
    if imagecodecs is not None:
        return _filled(imagecodecs.deflate_decode(data, out=out), out)
    # One byte more than there should be, so that too many are noticed and not all of them are made.
    return np.frombuffer(zlib.decompressobj().decompress(data, len(out) + 1), np.uint8)


def _unshuffle(data: Any, values: tuple[int, ...], out: Bytes) -> Bytes:
    # Byte i of every element lies together. One strided copy a plane: 3.5 GB/s, as fast as compiled unshufflers here.
    source, width = np.frombuffer(data, np.uint8), values[0]
    count = len(out) // width
    if len(source) != len(out):
        raise DataError(f"{len(source)} shuffled bytes where {len(out)} were expected")
    elements = out[: count * width].reshape(count, width)
    for plane in range(width):
        elements[:, plane] = source[plane * count : (plane + 1) * count]
    out[count * width :] = source[count * width :]
    return out


def _codec(name: str, **options: Any) -> Undo:
    def decode(data: Any, values: tuple[int, ...], out: Bytes) -> Bytes:
        return _filled(getattr(imagecodecs, f"{name}_decode")(data, out=out, **options), out)

    return decode


def _filled(decoded: Any, out: Bytes) -> Bytes:
    """Return `out`, which a codec should have filled to the last byte."""
    length = len(decoded)
    if length != len(out):
        raise DataError(f"{length} bytes decoded where {len(out)} were expected")
    return out


def _bitshuffle(data: Any, values: tuple[int, ...], out: Bytes) -> Bytes:
    """Undo bitshuffle (Masui et al. 2015), whose blocks are perhaps compressed one by one with LZ4 or Zstandard."""
    width, compression = values[2], values[4] if len(values) > 4 else 0
    view, count = memoryview(data), len(out) // width
    if compression == 0:
        default_block = max(8192 // width // 8 * 8, 128)
        block = (values[3] if len(values) > 3 else 0) or default_block
        # A block larger than the data is the whole of them, but for a rest of fewer than 8 elements.
        _unbitshuffle(view, width, min(block, max(8, count // 8 * 8)), out)
        return out
    total, block_bytes = struct.unpack(">QI", view[:12])
    if total != len(out):
        raise DataError(f"bitshuffle holds {total} bytes where {len(out)} were expected")
    if block_bytes == 0 or block_bytes % (8 * width):
        raise DataError(f"bitshuffle has blocks of {block_bytes} bytes, and elements of {width}")
    decode = imagecodecs.lz4_decode if compression == 2 else imagecodecs.zstd_decode
    place, start = 12, 0
    # The last block is shorter, in multiples of 8 elements; fewer than 8 elements at the end are stored as they are.
    rest = total % (8 * width)
    while start < total - rest:
        length = min(block_bytes, total - rest - start)
        (stored,) = struct.unpack(">I", view[place : place + 4])
        shuffled = decode(view[place + 4 : place + 4 + stored], out=length)
        _unbitshuffle(memoryview(shuffled), width, length // width, out[start : start + length])
        place, start = place + 4 + stored, start + length
    if rest:
        out[total - rest :] = np.frombuffer(view[place : place + rest], np.uint8)
    return out


def _unbitshuffle(view: memoryview, width: int, block: int, out: Bytes) -> None:
    # Of an array it would take the width from the dtype, and not as it is told.
    _filled(imagecodecs.bitshuffle_decode(view, itemsize=width, blocksize=block, out=memoryview(out.data)), out)


_UNDO: dict[int, Undo] = {
    DEFLATE: _inflate,
    SHUFFLE: _unshuffle,
    FLETCHER32: lambda data, values, out: out,  # handled by `undo`: it shortens its input and needs no room
    LZF: _codec("lzf"),
    BLOSC: _codec("blosc", numthreads=1),
    LZ4: _codec("lz4h5"),
    BITSHUFFLE: _bitshuffle,
    ZSTD: _codec("zstd"),
}
