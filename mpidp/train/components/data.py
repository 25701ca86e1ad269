"""The run file's data section in, a loader to train on and one to evaluate on out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpidp.config import DataSection, RunConfig
from mpidp.errors import ConfigError
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.loader import HDF5Loader
from mpidp.train.components.lookup import find
from mpidp.train.components.transforms import BUILT_IN

if TYPE_CHECKING:
    from mpidp.world.world import World


def build_loaders(config: RunConfig, world: World) -> tuple[HDF5Loader, HDF5Loader | None]:
    """Opens the data. The second loader reads every held-out sample once, in file order. Collective.

    Raises:
        DataError: files, datasets or sizes that cannot be used.
        ConfigError: a transform or decode function that cannot be found.
    """
    data = config.data
    with world.raise_on_all_ranks("finding the functions that the data section names"):
        transform = find("data.transform", data.transform, BUILT_IN) if data.transform else None
        of_samples = find("data.sample_transform", data.sample_transform, {}) if data.sample_transform else None
        specs = field_specs_of(data)
        if len(specs) < 2 and not data.transform:
            raise ConfigError(
                f"data.fields = {list(data.fields)}: the model takes the first field and the loss the second. "
                f"Name two, or give a data.transform that makes two."
            )
    fraction = data.validation_fraction
    make = partial(
        HDF5Loader,
        fields=specs,
        seed=config.run.seed,
        world=world,
        mode=data.mode,
        transform=transform,
        stage_folder=data.stage_folder or None,
        threads=data.threads or None,
        memory_bytes=data.memory_bytes or None,
        allow_holes=data.allow_holes,
    )
    training = make(
        data.train,
        global_batch=data.global_batch,
        shuffle=data.shuffle,
        lanes=data.lanes or None,
        mixing_chunks=data.mixing_chunks or None,
        split=("train", fraction) if fraction else None,
        sample_transform=of_samples,
        drop_last=data.drop_last,
    )
    if not data.validation and not fraction:
        return training, None
    paths = data.validation or data.train
    held_out = (
        world.call_on_root(lambda: describe(paths, specs, data.allow_holes).num_rows)
        if data.validation
        else training.dataset.num_rows - training.num_samples
    )
    evaluation = make(
        paths,
        global_batch=min(data.global_batch, held_out),
        shuffle="none",
        split=None if data.validation else ("validation", fraction),
    )
    return training, evaluation


def field_specs_of(data: DataSection) -> tuple[FieldSpec, ...]:
    """Return the specs of data.fields.

    Raises:
        ConfigError: a decode function that cannot be found.
        DataError: what no field can be.
    """
    return tuple(_field_spec(name, data) for name in data.fields)


def _field_spec(name: str, data: DataSection) -> FieldSpec:
    if name not in data.field:
        return FieldSpec(name)
    section = data.field[name]
    return FieldSpec(
        dataset=section.dataset or name,
        name=name,
        member=section.member,
        axis=section.axis,
        dtype=section.dtype,
        scale=section.scale,
        offset=section.offset,
        decode=find(f"data.field.{name}.decode", section.decode, {}) if section.decode else None,
        cf=section.cf,
    )
