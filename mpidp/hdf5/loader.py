"""The class `HDF5Loader`: this rank's batches of every step, read from HDF5 files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from mpidp.errors import DataError
from mpidp.hdf5.batch import Batch, Passes, check_agreed
from mpidp.hdf5.dataset import DataSet
from mpidp.hdf5.field import Fields, field_specs
from mpidp.hdf5.files.describe import Paths, absolute_paths, describe_on_all_ranks
from mpidp.hdf5.files.fingerprint import check_unchanged, fingerprint
from mpidp.hdf5.memory_budget import (
    choose_mixing,
    choose_shuffle,
    default_node_bytes,
    most_rows,
    resources,
    warnings_about,
)
from mpidp.hdf5.modes.stream import Assembled, FileRows
from mpidp.hdf5.order import Order, Part, Share, Shuffle, Split
from mpidp.hdf5.prefetch import BatchRing, Prefetcher
from mpidp.hdf5.read import RowReader, Selection, decoding, slow_paths
from mpidp.hdf5.transform import BatchMaker, BatchTransform, SampleTransform
from mpidp.world.system import memory_limit

if TYPE_CHECKING:
    from mpidp.hdf5.modes.memory import HeldRows
    from mpidp.world.world import World

Mode = Literal["stream", "node", "store", "stage"]

# Handing a small batch from thread to thread costs more than making it of rows that are decoded already.
INLINE_BYTES = 2**20

_SETTINGS = (
    "paths, fields, "
    "(global_batch, seed, shuffle, streams, mixing_chunks, split, mode, memory_bytes, allow_holes, drop_last)"
)


class HDF5Loader(Passes):
    """A loader of HDF5 files: `for batch in loader` gives this rank's batches of an epoch. Construction is collective.

        world = mpidp.init()
        loader = mpidp.HDF5Loader("train.h5", fields=("x", "y"), global_batch=256, split=("train", 0.1))
        for epoch in range(10):
            for batch in loader:
                loss = batch.weigh(F.cross_entropy(model(batch.x), batch.y))

    One `for` loop is one epoch; after it the next epoch, with another order, is current. A batch counts as
    consumed when it is handed out, so `state_dict()` inside the loop body includes it, but no batches that were only
    prefetched. A loop that was left early is continued by the next one, after the last batch handed out,
    which is logged once; `restart()` begins the epoch anew. In file order
    (`shuffle="none"`) every loop begins at the start instead, but for the first one after `load_state_dict`.
    Every rank takes the same number of steps, `len(loader)`. Iteration is not collective, except in mode "store", in
    which all ranks must take every step.

    Each field of a `Batch` is a tensor (samples of this rank, *shape of a sample) on `world.device`. A batch on the CPU
    is in memory of the loader, which is used again when nothing refers to it any more.

    Attributes:
        dataset: description of the files; `len(loader.dataset)` is the number of samples that this loader takes.
        order: which samples form the batches of each epoch.
        world: the ranks that share the samples.
        mode: where rows come from.

    Args:
        paths: one HDF5 file or several, read as one data set.
        fields: names of datasets, whose first axis counts the samples, or `FieldSpec`s for other cases.
        global_batch: samples of a step over all ranks.
        seed: of order, split and the transforms' random numbers; 0 to 2^64 - 1.
        world: the ranks that share the samples; those of `mpidp.init()` by default, and this process alone if it was
            not called. `World.alone()` is this process alone in any case.
        shuffle: "streams", "full" or "none" (see `Order`), or "auto": "full" for large samples that can be read one by
            one at little cost; else, or if streams or mixing_chunks are given, "streams".
        streams: see `Order`; chosen from the file, `global_batch` and `memory_bytes` when None.
        mixing_chunks: likewise.
        split: ("train", f) or ("validation", f) takes that part of the rows, f being the fraction for validation.
        transform: takes the fields of a batch, a dict of tensors (samples, ...) on the device, and returns such a
            dict with as many samples, which may be 0. If it takes a second argument, that is a `SampleRandom`.
            What it draws depends on seed, epoch and sample, not on the number of ranks.
        prefetch_batches: how many batches are read ahead, at least 1.
        mode: where rows come from; it never changes which samples form a batch. "stream": from the files, by threads.
            "node": from one decoded copy in the memory of each node. "store": from the memory of all ranks, over
            which the data are spread. "stage": from a copy of the files in `stage_folder`, made once a node.
        sample_transform: takes the fields of one sample on the CPU and a `torch.Generator` of the sample's own, and
            returns the same fields and shapes for every sample.
        stage_folder: a folder on each node for mode "stage"; the job's temporary folder when None.
        threads: number of threads that decode; this rank's cores when None.
        memory_bytes: memory of each node for decoded rows that are read ahead; an eighth of it, at most 2 GiB, when
            None.
        allow_holes: whether chunks that were never written may read as the dataset's fill value.
        drop_last: leave out an epoch's last step if it has fewer than `global_batch` samples.

    Raises:
        DataError: on every rank: files or values that cannot be used.
        MismatchError: on every rank: ranks were given different values.
        LaunchError: no `world` was given in a job of several processes without `mpidp.init()`.

    Warns:
        UserWarning: on rank 0: datasets that only HDF5 can read, and orders that mix little or decode chunks often.
    """

    def __init__(
        self,
        paths: Paths,
        fields: Fields,
        global_batch: int,
        seed: int = 0,
        world: World | None = None,
        shuffle: Shuffle | Literal["auto"] = "auto",
        streams: int | None = None,
        mixing_chunks: int | None = None,
        split: tuple[Part, float] | None = None,
        transform: BatchTransform | None = None,
        prefetch_batches: int = 2,
        *,
        mode: Mode = "stream",
        sample_transform: SampleTransform | None = None,
        stage_folder: str | Path | None = None,
        threads: int | None = None,
        memory_bytes: int | None = None,
        allow_holes: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(world, "an HDF5Loader", "loader")
        world, specs = self.world, field_specs(fields)
        order = (global_batch, seed, shuffle, streams, mixing_chunks, split, mode, memory_bytes, allow_holes, drop_last)
        given = (tuple(spec.settings() for spec in specs), order)
        check_agreed(world, given, "an HDF5Loader", _SETTINGS, absolute_paths(paths))
        self.dataset = describe_on_all_ranks(world, paths, specs, allow_holes)
        self._node_bytes = memory_bytes or world.call_on_root(lambda: default_node_bytes(memory_limit()))
        with world.raise_on_all_ranks("choosing the order of the samples"):
            _check_at_least_1(prefetch_batches=prefetch_batches, threads=threads)
            if mode not in get_args(Mode):
                raise DataError(f'mode is {mode!r}; give "stream", "node", "store" or "stage"')
            self._selection = _select(self.dataset, split, seed)
            self._adopts_shuffle = shuffle == "auto" and streams is None and mixing_chunks is None
            self.order = self._choose_order(global_batch, seed, shuffle, streams, mixing_chunks, drop_last)
            self.dataset = replace(self.dataset, num_selected=self.order.num_samples)
        self.mode = mode
        self._threads = threads or world.cores
        self._prefetch_batches, self._stage_folder = prefetch_batches, stage_folder
        self._make_batch = BatchMaker(world, transform, sample_transform)
        self._steps: Prefetcher[Assembled] | Generator[Assembled, None, None] | None = None
        self._steps_at = (0, 0)
        self._pid = os.getpid()
        if world.rank == 0:
            order_warnings = warnings_about(self.order, self.dataset, self._rank_bytes, world.size)
            for text in [*slow_paths(self.dataset), *order_warnings]:
                warnings.warn(text, stacklevel=2)
        self._ring = self._new_ring()
        self._source: FileRows | HeldRows | None = self._open_source()

    def _choose_order(
        self,
        global_batch: int,
        seed: int,
        shuffle: Shuffle | Literal["auto"],
        streams: int | None,
        mixing_chunks: int | None,
        drop_last: bool,
    ) -> Order:
        """Return the order of the selected rows; what was left to the loader follows from the data set."""
        chunk_rows = self._selection.chunk_rows
        if shuffle == "auto":
            shuffle = choose_shuffle(self.dataset) if self._adopts_shuffle else "streams"
        if streams is None or mixing_chunks is None:
            streams, mixing_chunks = choose_mixing(self.dataset, self._node_bytes, streams, mixing_chunks, global_batch)
        if global_batch > chunk_rows.sum():
            raise DataError(
                f"global_batch is {global_batch}, but there are only {chunk_rows.sum()} samples in "
                f"{self.dataset.files[0].path}; give at most that many"
            )
        return Order(chunk_rows, seed, streams, mixing_chunks, global_batch, shuffle, drop_last)

    @property
    def line(self) -> str:
        """Where rows come from, in what order and how they are decoded, in one line."""
        order = f"shuffle {self.order.shuffle}"
        if self.order.shuffle == "streams":
            order += f" ({self.order.streams} streams of {self.order.mixing_chunks} chunks)"
        where = "" if self._source is None else f", {self._source.line}"
        threads = f"{self._threads} thread{'s' * (self._threads > 1)} a rank"
        return f"{order}{where}, {decoding(self.dataset)} by {threads}"

    def __iter__(self) -> Iterator[Batch]:
        this = self._begin_pass()
        while self.remaining_steps:
            self._check_pass(this)
            self._check_process()
            try:
                assembled = next(self._steps_here())
            except BaseException:
                self._end_reading()  # so that another pass starts anew, and raises again if the cause remains
                raise
            self._position = assembled.step.stop
            self._steps_at = self._epoch, self._position
            yield self._make_batch(assembled, self.order.seed)
        if self._pass is this:
            self._finish_epoch()

    def stop(self) -> None:
        """End the pass in progress, if any, and all threads. The position stays, and another pass may follow."""
        super().stop()
        self._end_reading()

    def close(self) -> None:
        """End the pass in progress and all threads, and free memory and copied files. The position stays.

        Not collective. Another pass opens what is needed again in mode "stream"; in the others it is an error.
        """
        self.stop()
        if self.mode != "stream" and self._source is not None:
            self._source.close()
            self._source = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, global samples handed out, and all that the order depends on. Not collective."""
        state = self._state("seed", "streams", "mixing_chunks", "shuffle", "global_batch")
        return {**state, "files": fingerprint(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed: bool = False) -> None:
        """Go on where `state` was taken: exactly its unseen samples follow. Not collective; call it on every rank.

        Seed, streams, mixing_chunks and, if it was chosen by "auto", shuffle of `state` are adopted. Another global
        batch, another number of ranks and other paths of the same files are fine.

        Args:
            state: what `state_dict()` returned, of a loader of this version.
            accept_changed: if the files hold other rows, chunks or values than those of `state`, begin the epoch anew
                and log it, instead of raising.

        Raises:
            DataError: other rows, chunks or values; another shuffle; and, if the rows are split by the seed, another
                seed.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise DataError(f"the state lacks {', '.join(sorted(missing))}; it is not one of a loader of this version")
        same = check_unchanged(state["files"], self.dataset, accept_changed, speaks=self.world.rank == 0)
        fixed: dict[str, Any] = {"num_samples": self.num_samples} if same else {}
        if not self._adopts_shuffle:
            fixed["shuffle"] = self.order.shuffle
        if self._selection.split is not None:
            fixed["seed"] = self.order.seed  # or rows held out for validation would now be trained on
        names = ("seed", "streams", "mixing_chunks", "shuffle") if same else ("seed",)
        order = replace(self.order, **{name: state[name] for name in names})
        self._take_position(state, fixed, state["position"] if same else 0)
        self.order = order
        self._ring = self._new_ring()  # with other streams, a rank may have more samples in a step

    @property
    def _rank_bytes(self) -> int:
        return self._node_bytes // self.world.local_size

    def _open_source(self) -> FileRows | HeldRows:
        """Return where rows come from. Collective; in modes other than "stream" it reads or copies all data."""
        if self.mode == "stream":
            return FileRows(self._selection, "read from the files as they are needed")
        if self.mode == "stage":
            from mpidp.hdf5.modes.stage import Staging

            staging = Staging(self.dataset.paths, self.world, self._stage_folder)
            staged = replace(self._selection, dataset=self._selection.dataset.moved(staging.paths))
            return FileRows(staged, staging.line, staging.close)
        # Importing these loads MPI, which planning a run on a login node must not.
        from mpidp.hdf5.modes.memory import Contents, NodeMemory, SpreadMemory

        contents = Contents.of(self._selection)
        with closing(RowReader(self._selection)) as reader:
            if self.mode == "store" and self.world.size > 1:
                return SpreadMemory(contents, reader.read, self.world, self._threads)
            return NodeMemory(contents, reader.read, self.world, self._threads, self.mode)

    def _new_ring(self) -> BatchRing:
        """Return memory for the batches that wait, the one being made and the one being used."""
        most = min(self.order.global_batch, most_rows(self.order, self.world.size))
        return BatchRing(self.dataset.fields, most, self._prefetch_batches + 2, self.world.device)

    def _steps_here(self) -> Iterator[Assembled]:
        """Return the iterator whose next step is the one at the present position."""
        if self._steps is None or self._steps_at != (self._epoch, self._position):
            self._end_reading()
            if self._source is None:
                raise DataError("this loader is closed; make another")
            size, rank = self.world.size, self.world.rank
            use = resources(self.order, self.dataset.row_bytes, self._rank_bytes, self._threads, size, rank)
            share = Share(self._epoch, self._position, size, rank)
            make = partial(self._source.steps, self.order, share, self._ring, use)
            ahead = self._source.may_run_ahead and self._ring.batch_bytes > INLINE_BYTES
            self._steps = Prefetcher(make, self._prefetch_batches) if ahead else make()
        return self._steps

    def _check_process(self) -> None:
        """Raise `DataError` in a fork of the process that made this loader: its threads are not there."""
        if os.getpid() != self._pid:
            raise DataError(
                f"this loader was made in process {self._pid} and is used in its fork {os.getpid()}, where its threads "
                "are missing; use it where it was made, without worker processes: it reads ahead by itself"
            )

    def _end_reading(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _finish_epoch(self) -> None:
        ended = self._epoch, self._position
        super()._finish_epoch()
        if self._steps is not None and self._steps_at == ended:
            self._steps_at = self._epoch, 0  # which is what they give next


def _check_at_least_1(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}; give at least 1")


def _select(dataset: DataSet, split: tuple[Part, float] | None, seed: int) -> Selection:
    """Return the rows that are used: all, or a part of a split. Raises `DataError` for a part that there is not."""
    if split is None:
        return Selection(dataset)
    part, fraction = split
    if part not in ("train", "validation"):
        raise DataError(f'split asks for part {part!r}; give "train" or "validation"')
    return Selection(dataset, Split(dataset.chunk_rows, fraction, seed), part)
