"""Writing of one rank's part of a checkpoint: a copy of the state in host memory, written by a thread.

Training waits for the copy only. The first copy also allocates its memory, which takes longer than the copy itself; the
next ones use it again. Files are hashed while they are written, and flushed to the disk.
"""

import copy
import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from mpidp.train.checkpoint.disk import as_checkpoint_error
from mpidp.train.checkpoint.manifest import ALGORITHM, File
from mpidp.world.record_file import flush_folder
from mpidp.world.status import status

_Place = tuple[str | int, ...]


class Snapshot:
    """Buffers for copies of a state. The next `take` overwrites what the last one returned."""

    def __init__(self) -> None:
        self._buffers: dict[_Place, Tensor] = {}
        self._used: dict[_Place, Tensor] = {}
        self._seen: dict[tuple[Any, ...], Tensor] = {}
        self._waits = False  # whether copies from a GPU may still be running

    def take(self, state: Any) -> Any:
        """Returns the same nested dicts, lists and tuples, with copies of all tensors, which may be on any device.

        Tensors that are one and the same memory, such as tied weights, stay so. Returns when the copy is complete.
        """
        self._used, self._seen, self._waits = {}, {}, False
        with torch.no_grad():
            result = self._copy(state, ())
        if self._waits:
            torch.cuda.synchronize()
        self._buffers, self._seen = self._used, {}
        return result

    def _copy(self, value: Any, place: _Place) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), place)
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*place, index)) for index, item in enumerate(value))
        if isinstance(value, dict):
            items = {key: self._copy(item, (*place, key)) for key, item in value.items()}
            if type(value) is dict:
                return items
            other = copy.copy(value)  # an OrderedDict with its metadata, as state_dict() makes
            other.update(items)
            return other
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, place: _Place) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and memory in self._seen:
            return self._seen[memory]
        place = (tensor.device.type, *place)
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        ):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        self._waits |= tensor.is_cuda
        self._used[place] = self._seen[memory] = buffer
        return buffer


def write_parts(folder: Path, parts: dict[str, dict[str, Any]]) -> tuple[File, ...]:
    """Writes one rank's files, by name, into a folder that some rank makes.

    Raises:
        CheckpointError: they cannot be written; the message says which and why.
    """
    path = folder
    try:
        with status.working("write a checkpoint"):
            folder.mkdir(exist_ok=True)
            files = []
            for name, state in parts.items():
                path = folder / name
                files.append(write_part(path, state))
            flush_folder(folder)
            flush_folder(folder.parent)
    except Exception as error:
        raise as_checkpoint_error(error, path) from error
    return tuple(files)


def write_part(path: Path, state: dict[str, Any]) -> File:
    """Writes a state for `torch.load(path, weights_only=True)`; returns the length and checksum of the file.

    The checksum is of the bytes given to the system, not of those read back: so it finds bytes that a disk lost.

    Args:
        path: the file; must not exist.
        state: nested dicts, lists and tuples of tensors on the CPU, numbers and strings.

    Raises:
        OSError: the file system refuses.
    """
    with open(path, "xb") as file:
        hashed = _Hashed(file)
        try:
            torch.save(state, cast(BinaryIO, hashed))
        except RuntimeError:
            if hashed.error is not None:  # torch raises another error after it
                raise hashed.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return File(path.name, hashed.num_bytes, hashed.hash.hexdigest())


class _Hashed:
    """The file object for torch, which hashes what is written."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.hash = hashlib.new(ALGORITHM)
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        """Hashes and writes all of it."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.num_bytes += data.nbytes if isinstance(data, memoryview) else len(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing; torch calls it."""
        self._file.flush()
