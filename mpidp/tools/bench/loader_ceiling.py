"""Enters: a described data set. Leaves: what no loader can pass: reading its bytes, and decoding them from memory."""

import threading
from collections.abc import Callable

import numpy as np

from mpidp.hdf5.dataset import DataSet, Storage
from mpidp.hdf5.decode import RawFiles
from mpidp.hdf5.filters import Bytes, Scratch, undo


class Ceiling:
    """The chunks of the field with most bytes a row, of the first file, up to about `most_rows` rows."""

    def __init__(self, dataset: DataSet, most_rows: int) -> None:
        number = int(np.argmax([field.row_bytes for field in dataset.fields]))
        storage = dataset.files[0].storages[number]
        self.storage: Storage | None = storage if storage is not None and storage.chunked else None
        self.num_rows = 0
        if self.storage is None:
            return
        blocks = min(len(self.storage.offsets), -(-most_rows // self.storage.block_rows))
        self._offsets = self.storage.offsets[:blocks].ravel()
        self._sizes = self.storage.sizes[:blocks].ravel()
        self.num_rows = min(blocks * self.storage.block_rows, self.storage.num_rows)
        self._files = RawFiles()
        self._raw = [self._read(*place) for place in zip(self._offsets.tolist(), self._sizes.tolist(), strict=True)]

    def read(self, threads: int) -> None:
        """Read all chunks from the file."""
        room = [np.empty(int(self._sizes.max()), np.uint8) for _ in range(threads)]
        places = list(zip(self._offsets.tolist(), self._sizes.tolist(), strict=True))
        assert self.storage is not None
        path = self.storage.path

        def work(thread: int) -> None:
            for offset, size in places[thread::threads]:
                self._files.read(path, offset, room[thread][:size])

        _in_threads(work, threads)

    def decode(self, threads: int) -> None:
        """Undo the filters of all chunks, which are in memory, each thread into one buffer."""
        storage = self.storage
        assert storage is not None
        room = [np.empty(storage.chunk_bytes, np.uint8) for _ in range(threads)]
        scratch = [Scratch() for _ in range(threads)]

        def work(thread: int) -> None:
            for raw in self._raw[thread::threads]:
                undo(raw, storage.filters, 0, storage.chunk_bytes, scratch[thread], room[thread])

        _in_threads(work, threads)

    def close(self) -> None:
        """Close the file."""
        if self.storage is not None:
            self._files.close()

    def _read(self, offset: int, size: int) -> Bytes:
        assert self.storage is not None
        raw = np.empty(size, np.uint8)
        self._files.read(self.storage.path, offset, raw)
        return raw


def _in_threads(work: Callable[[int], None], threads: int) -> None:
    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
