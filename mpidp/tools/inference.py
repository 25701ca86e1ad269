"""What a trained model returns for every sample of a data set, written as an HDF5 file: the work of `mpidp predict`.

All ranks read and compute, each its share of a step. Rank 0 writes one step after the other, in the order of the data,
so no rank holds more than one step. Everything here is collective, unless it says otherwise.
"""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mpidp
from mpidp import config as settings
from mpidp.config import RunConfig
from mpidp.errors import CheckpointError, ConfigError, DataError
from mpidp.hdf5.batch import Batch
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.write import NewRows
from mpidp.printable import listed
from mpidp.tools.table import Ticker
from mpidp.train.checkpoint.read import STATE, check_readable, newest_readable, read
from mpidp.train.components import TRANSFORMS, build_model, field_specs_of, find
from mpidp.train.forward import explain
from mpidp.train.precision import Precision
from mpidp.train.run import choose_threads
from mpidp.train.state import check_model
from mpidp.world.world import World

DATASET = "prediction"


@dataclass(frozen=True)
class Trained:
    """A model with the weights of a checkpoint, in evaluation mode, and the configuration of its run."""

    config: RunConfig
    module: nn.Module
    precision: Precision
    checkpoint: Path
    step: int


def load(world: World, place: Path, is_one: bool, config: RunConfig | None) -> Trained:
    """Build the model of a run and load a checkpoint into it.

    Args:
        world: the ranks.
        place: a checkpoint, or a folder of checkpoints, of which the newest that all ranks can read is taken.
        is_one: whether it is a checkpoint.
        config: the run; None takes what the checkpoint says of it.

    Raises:
        CheckpointError: no usable checkpoint, or one of another model.
        ConfigError: a model that cannot be built, or a checkpoint that does not say what it is of.
    """
    if is_one:
        path, passed_over = place, list[str]()
        check_readable(world, path)
    else:
        path, passed_over = newest_readable(world, place)
    for line in passed_over:
        world.log_once(f"skipped a newer checkpoint: {line}")
    with world.raise_on_all_ranks("building the model"):
        saved = read(path, STATE)
        config = config or _config_of(saved, path)
        torch.set_num_threads(choose_threads(config.train.threads, os.environ, world.cores))
        module = build_model(config)
        check_model(module.state_dict(), saved["model"], f"checkpoint {path}")
        module.load_state_dict(saved["model"])
        averages = saved.get("others", {}).get("ema") if "config" in saved else None
        if averages is not None:  # which the evaluation took, too
            module.load_state_dict(averages["model"])
        elif config.train.ema_decay:
            raise CheckpointError(
                f"checkpoint {path} holds no averages, but train.ema_decay = {config.train.ema_decay:g}. Set it to "
                f"0, or take a checkpoint of a run with averages."
            )
        module.to(world.device).eval()
        precision = Precision(config.train.precision, world.device)
    world.status.step = saved["step"]
    return Trained(config, module, precision, path, saved["step"])


def _config_of(saved: dict[str, Any], path: Path) -> RunConfig:
    if "config" not in saved:
        raise ConfigError(
            f"checkpoint {path} is of a training loop of your own, and does not say how to build its model. Write a "
            f"run file with the same model, and give it with --checkpoint={path}."
        )
    return settings.from_dict(tomllib.loads(saved["config"]), source=f"checkpoint {path}")


def open_data(world: World, config: RunConfig, files: Sequence[str], fields: Sequence[str]) -> HDF5Loader:
    """Open the data in the order of the files, every row once.

    Args:
        world: the ranks.
        config: the run.
        files: HDF5 files.
        fields: which of the run's fields to read; those that the model needs if there are none.

    Raises:
        ConfigError: an unknown field; a function that the data section names cannot be found.
        DataError: files that cannot be used.
    """
    data = config.data
    with world.raise_on_all_ranks("finding the functions that the data section names"):
        transform = find("data.transform", data.transform, TRANSFORMS) if data.transform else None
        specs = {spec.name: spec for spec in field_specs_of(data)}
        names = tuple(fields) or (data.fields if transform else data.fields[:1])
        for name in names:
            if name not in specs:
                raise ConfigError(f"--fields={','.join(names)}: the run has no field {name}, but {listed(specs)}.")
    chosen = [specs[name] for name in names]
    rows = world.call_on_root(lambda: describe(files, chosen, data.allow_holes).num_rows)
    return HDF5Loader(
        files,
        chosen,
        min(data.global_batch, rows),
        seed=config.run.seed,
        world=world,
        shuffle="none",
        transform=transform,
        threads=data.threads or None,
        memory_bytes=data.memory_bytes or None,
        allow_holes=data.allow_holes,
    )


def write(world: World, loader: HDF5Loader, trained: Trained, path: Path) -> tuple[int, ...]:
    """Write the predictions for all rows to a new file; return the shape of the dataset.

    Raises:
        DataError: samples that cannot be read, or that the model does not take; the file cannot be written.
    """
    rows: NewRows | None = None
    ticker = Ticker("predicting", loader.num_samples * loader.dataset.row_bytes, world.rank == 0)
    batches, attributes = iter(loader), _attributes(loader, trained)
    for _ in range(len(loader)):
        with world.raise_on_all_ranks("predicting"):
            batch = next(batches)
            values = _predictions(trained, world, batch)
        values = world.gather_rows(values, batch.indices, batch.global_size)
        shape = (loader.num_samples, *values.shape[1:])
        with world.raise_on_all_ranks("writing the predictions"):
            if world.rank == 0:
                rows = rows or NewRows(str(path), DATASET, shape, values.numpy().dtype, attributes)
                rows.append(values.numpy())
        ticker.add(batch.global_size * loader.dataset.row_bytes)
    with world.raise_on_all_ranks("writing the predictions"):
        if rows is not None:
            rows.close()
    return shape


def _predictions(trained: Trained, world: World, batch: Batch) -> Tensor:
    """Return a row for each sample of a batch. Not collective."""
    if not batch.size:
        return torch.empty(0)
    config, (name, *_) = trained.config, batch.fields
    inputs = batch[name]
    if inputs.is_floating_point():
        inputs = inputs.to(trained.precision.dtype)
    try:
        with torch.no_grad(), trained.precision.autocast():
            output = trained.module(inputs)
    except Exception as error:
        refused = explain(error, config, trained.module, world, {name: inputs}, None)
        if refused is None:
            raise
        raise refused from error
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != batch.size:
        found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"type {type(output).__name__}"
        raise DataError(
            f"model {config.model.name} returned an output of {found} for {batch.size} samples; one tensor is written, "
            f"with a row for each sample. Wrap the model in one that returns such."
        )
    return output.float() if output.dtype == torch.bfloat16 else output  # a type that HDF5 and NumPy do not have


def _attributes(loader: HDF5Loader, trained: Trained) -> dict[str, Any]:
    """Return what the dataset says of its origin."""
    return {
        "run": trained.config.run.name,
        "model": trained.config.model.name,
        "checkpoint": str(trained.checkpoint.absolute()),
        "step": trained.step,
        "data": list(loader.dataset.paths),
        "config": settings.to_toml(trained.config),
        "mpidp": mpidp.__version__,
    }
