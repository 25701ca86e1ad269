"""The loader: HDF5 files in, this rank's batch of every step out."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mpidp.errors import DataError
from mpidp.hdf5.batch import Batch
from mpidp.hdf5.field import Fields, field_specs
from mpidp.hdf5.files.describe import Paths, absolute_paths
from mpidp.hdf5.files.fingerprint import check_unchanged, fingerprint
from mpidp.hdf5.memory_budget import (
    choose_mixing,
    choose_shuffle,
    default_node_bytes,
    most_rows,
    resources,
    warnings_about,
)
from mpidp.hdf5.modes.source import Mode, Source, Stretch, check_mode, open_source
from mpidp.hdf5.order.order import Order, Passes, Share, Shuffle
from mpidp.hdf5.order.split import Part
from mpidp.hdf5.prefetch import BatchRing
from mpidp.hdf5.preparation import call_on_root, check_agreed, check_batches, choose_threads, describe_together, select
from mpidp.hdf5.read import decoding, slow_paths
from mpidp.hdf5.transform import BatchMaker, BatchTransform, SampleTransform
from mpidp.world.current import CurrentWorld, resolve_world
from mpidp.world.system import memory_limit

if TYPE_CHECKING:
    from mpidp.world.world import World

log = logging.getLogger("mpidp")

_SETTINGS = (
    "paths, fields, "
    "(global_batch, seed, shuffle, lanes, mixing_chunks, split, mode, memory_bytes, allow_holes, drop_last)"
)


class HDF5Loader(Passes):
    """Iterates over the steps of an epoch; constructing it is collective.

    One `for` loop is one epoch; at its end the next epoch, with another order, is current. A batch counts as
    consumed when it is handed out, so `state_dict()` inside the loop body includes it, and what was only read
    ahead is never included. A loop that was left early is continued by the next one, behind the last batch
    handed out, and the logger `mpidp` says so once; `restart()` begins the epoch anew. In file order
    (`shuffle="none"`) every loop begins at the start instead, but for the first one after `load_state_dict`.
    Every rank takes the same number of steps; no iteration is collective, but for mode "store", in which every
    rank must take them.

    A batch on the CPU is memory of the loader's, which is used again when nothing refers to it any more.

    paths: one HDF5 file or several, laid end to end. fields: names of datasets, or `FieldSpec`s for what is
    not taken as it is stored along the first axis. global_batch: samples of a step over all ranks. seed: of
    order, split and the transforms' random numbers. world: the ranks that share the samples; those of
    `mpidp.init()` by default, and with None this process alone, on the CPU. shuffle: "lanes", "full" or "none"
    (see `Order`), or "auto": "full" for large samples that can be read one by one at next to no cost, else, or where
    lanes or mixing_chunks are given, "lanes". lanes, mixing_chunks: see `Order`; chosen from the file, `global_batch`
    and `memory_bytes` when None. split: ("train", f) or ("validation", f) takes that part of the rows, f being the
    fraction for validation. drop_last: leave out an epoch's last step if it has fewer than `global_batch` samples.

    mode: where rows come from; it never changes which samples form a batch. "stream": from the files, by
    threads. "node": from one decoded copy in the memory of each node. "store": from the memory of all ranks,
    over which the data are spread. "stage": from a copy of the files in `stage_folder` (by default the job's
    temporary folder), made once a node.

    transform: is given the fields of a batch, a dict of tensors (samples, ...) on the device, and returns such
    a dict with as many samples; batches may have none. If it takes a second argument, that is a
    `SampleRandom`. sample_transform: is given the fields of one sample on the CPU and a `torch.Generator`.
    What they draw depends on seed, epoch and sample, not on the number of ranks.

    prefetch_batches: how many batches are read ahead. threads: that decode; this rank's cores when None.
    memory_bytes: of each node that decoded rows read ahead may take; an eighth of it, at most 2 GiB, when None.
    allow_holes: whether chunks that were never written may read as the dataset's fill value.

    dataset: what was found in the files; `len(loader.dataset)` is the number of samples that this loader takes.

    Raises `DataError` on every rank for files or values that cannot be used, `MismatchError` when ranks were
    given different ones, and `LaunchError` for no `world` in a job of several processes without `mpidp.init()`.
    """

    def __init__(
        self,
        paths: Paths,
        fields: Fields,
        global_batch: int,
        seed: int = 0,
        world: World | CurrentWorld | None = "current",
        shuffle: Shuffle | Literal["auto"] = "auto",
        lanes: int | None = None,
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
        super().__init__()
        self.world = world = resolve_world(world, "an HDF5Loader")
        specs = field_specs(fields)
        order = (global_batch, seed, shuffle, lanes, mixing_chunks, split, mode, memory_bytes, allow_holes, drop_last)
        given = (tuple(spec.settings() for spec in specs), order)
        check_agreed(world, given, "an HDF5Loader", _SETTINGS, absolute_paths(paths))
        self.dataset = describe_together(world, paths, specs, allow_holes)
        node_bytes = memory_bytes or call_on_root(world, lambda: default_node_bytes(memory_limit()))
        self._node_bytes = node_bytes
        self._rank_bytes = node_bytes // (1 if world is None else world.local_size)
        with nullcontext() if world is None else world.raise_on_all_ranks("choosing the order of the samples"):
            check_mode(mode)
            self._selection = select(self.dataset, split, seed)
            self._adopts_shuffle = shuffle == "auto" and lanes is None and mixing_chunks is None
            if shuffle == "auto":
                shuffle = choose_shuffle(self.dataset) if self._adopts_shuffle else "lanes"
            if lanes is None or mixing_chunks is None:
                lanes, mixing_chunks = choose_mixing(self.dataset, node_bytes, lanes, mixing_chunks, global_batch)
            num_samples = int(self._selection.chunk_rows.sum())
            check_batches(global_batch, prefetch_batches, num_samples, self.dataset)
            self.dataset = replace(self.dataset, num_selected=num_samples)
            self.order = Order(self._selection.chunk_rows, seed, lanes, mixing_chunks, global_batch, shuffle, drop_last)
            self._threads = choose_threads(threads, world)
        self.mode = mode
        self._make_batch = BatchMaker(world, transform, sample_transform)
        self._stretch: Stretch | None = None
        self._stretch_at = (0, 0)
        self._pass = object()
        self._pid = os.getpid()
        if world is None or world.rank == 0:
            for text in [*slow_paths(self.dataset), *self._order_warnings()]:
                warnings.warn(text, stacklevel=2)
        self._prefetch_batches, self._stage_folder = prefetch_batches, stage_folder
        self._kept = (0, 0)
        self._source: Source | None = self._open_source()

    @property
    def line(self) -> str:
        """Where rows come from, in what order and how they are decoded, in one line."""
        order = f"shuffle {self.order.shuffle}"
        if self.order.shuffle == "lanes":
            order += f" ({self.order.lanes} lanes of {self.order.mixing_chunks} chunks)"
        where = "" if self._source is None else f", {self._source.line}"
        threads = f"{self._threads} thread{'s' * (self._threads > 1)} a rank"
        return f"{order}{where}, {decoding(self.dataset)} by {threads}"

    def __iter__(self) -> Iterator[Batch]:
        this = self._pass = object()
        self._begin_pass("an HDF5Loader", "loader", speaks=self._ranks[1] == 0)
        while self.remaining_steps:
            if self._pass is not this:
                raise RuntimeError("this pass over the loader was closed, for instance by another pass that began")
            self._check_process()
            try:
                assembled = next(self._steps())
            except BaseException:
                self._end_reading()  # so that another pass starts anew, and says what is wrong if it still is
                raise
            self._position = assembled.step.stop
            self._stretch_at = self._epoch, self._position
            yield self._make_batch(assembled, self.order.seed)
        if self._pass is this:
            self._finish_epoch()

    def restart(self) -> None:
        """Begin the current epoch anew, from its first step: end the pass in progress, if any. Not collective."""
        self.stop()
        self._position, self._continues = 0, False
        self.keep()

    def stop(self) -> None:
        """End the pass in progress, if any, and all threads. The position stays, and another pass may follow."""
        self._pass = object()
        self._end_reading()

    def close(self) -> None:
        """End the pass in progress and all threads, and give back memory and copied files. The position stays.

        Collective in modes "node" and "store". Another pass opens what is needed again in mode "stream"; in the
        others it is an error.
        """
        self.stop()
        if self.mode != "stream" and self._source is not None:
            self._source.close()
            self._source = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on, and how many global samples of which epoch were handed out."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_samples": self.num_samples,
            "seed": self.order.seed,
            "lanes": self.order.lanes,
            "mixing_chunks": self.order.mixing_chunks,
            "shuffle": self.order.shuffle,
            "global_batch": self.order.global_batch,
            "files": fingerprint(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed: bool = False) -> None:
        """Go on where `state` was taken: exactly its unseen samples follow.

        Seed, lanes, mixing_chunks and, if it was chosen by "auto", shuffle of `state` are adopted. Another global
        batch, another number of ranks and other paths of the same files are fine. accept_changed: begin the epoch
        anew, and say so, where the files hold other rows, chunks or values than those of `state`, instead of raising.
        Raises `DataError` for these and another shuffle, and, if the rows are split by the seed, for another seed.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise DataError(f"the state lacks {', '.join(sorted(missing))}; it is not one of a loader of this version")
        same = check_unchanged(state["files"], self.dataset, accept_changed, speaks=self._ranks[1] == 0)
        fixed: dict[str, Any] = {"num_samples": self.num_samples} if same else {}
        if not self._adopts_shuffle:
            fixed["shuffle"] = self.order.shuffle
        if self._selection.split is not None:
            fixed["seed"] = self.order.seed  # or rows held out for validation would now be trained on
        for name, here in fixed.items():
            if state[name] != here:
                raise DataError(
                    f"the checkpoint was written with {name} = {state[name]!r}, this loader has {here!r}; "
                    "resume with the same data and settings"
                )
        position = state["position"] if same else 0
        if not 0 <= position <= self.num_samples or state["epoch"] < 0:
            place = f"epoch {state['epoch']}, position {position}"
            raise DataError(f"the checkpoint is at {place}, outside {self.num_samples} samples; it is damaged")
        self.stop()
        names = ("seed", "lanes", "mixing_chunks", "shuffle") if same else ("seed",)
        self.order = replace(self.order, **{name: state[name] for name in names})
        if self._source is not None:
            self._source.ring = self._ring()  # with other lanes, a rank may have more samples in a step
        self._epoch, self._position, self._continues = state["epoch"], position, True
        self.keep()

    def keep(self) -> None:
        """What was handed out so far has been trained on: `rebuild` goes back to here."""
        self._kept = self._epoch, self._position

    def rebuild(self) -> None:
        """Deal the samples anew, from where `keep` was called last, after `world` lost ranks. Collective.

        Samples that were handed out since then come again, and no other sample does. In mode "store" all data are
        read once more; in the other modes what nodes hold stays.
        """
        self.stop()
        (self._epoch, self._position), self._continues = self._kept, True
        if self._source is None:
            return
        assert self.world is not None
        self._rank_bytes = self._node_bytes // self.world.local_size
        self._source.renew(self._ring())
        if self.mode == "store":
            self._source = self._open_source()

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.world is None else self.world.device

    @property
    def _ranks(self) -> tuple[int, int]:
        return (1, 0) if self.world is None else (self.world.size, self.world.rank)

    def _open_source(self) -> Source:
        """Return where rows come from. Collective."""
        depth, ring = self._prefetch_batches, self._ring()
        return open_source(self.mode, self._selection, self.world, ring, depth, self._threads, self._stage_folder)

    def _ring(self) -> BatchRing:
        """Return memory for the batches that wait, the one being made and the one being used."""
        size, _ = self._ranks
        most = min(self.order.global_batch, most_rows(self.order, size))
        return BatchRing(self.dataset.fields, most, self._prefetch_batches + 2, self._device)

    def _order_warnings(self) -> list[str]:
        return warnings_about(self.order, self.dataset, self._rank_bytes, self._ranks[0])

    def _steps(self) -> Stretch:
        """Return what gives the step at the present position next."""
        if self._stretch is None or self._stretch_at != (self._epoch, self._position):
            self._end_reading()
            if self._source is None:
                raise DataError("this loader is closed; make another")
            size, rank = self._ranks
            use = resources(self.order, self.dataset.row_bytes, self._rank_bytes, self._threads, size, rank)
            self._stretch = self._source.steps(self.order, Share(self._epoch, self._position, size, rank), use)
        return self._stretch

    def _check_process(self) -> None:
        """Raise `DataError` in a fork of the process that made this loader: its threads are not there."""
        if os.getpid() != self._pid:
            raise DataError(
                f"this loader was made in process {self._pid} and is used in its fork {os.getpid()}, where its threads "
                "are missing; use it where it was made, without worker processes: it reads ahead by itself"
            )

    def _end_reading(self) -> None:
        if self._stretch is not None:
            self._stretch.close()
            self._stretch = None

    def _finish_epoch(self) -> None:
        ended = self._epoch, self._position
        super()._finish_epoch()
        if self._stretch is not None and self._stretch_at == ended:
            self._stretch_at = self._epoch, 0  # which is what it gives next
