"""The run file's data section in, a loader to train on and one to evaluate on out."""

from mpidp.config import RunConfig
from mpidp.errors import ConfigError
from mpidp.hdf5.describe import describe
from mpidp.hdf5.loader import HDF5Loader
from mpidp.train.lookup import find
from mpidp.train.transforms import BUILT_IN
from mpidp.world.world import World


def build_loaders(config: RunConfig, world: World) -> tuple[HDF5Loader, HDF5Loader | None]:
    """Opens the data. The second loader reads every held-out sample once, in file order. Collective.

    Raises:
        DataError: files, datasets or sizes that cannot be used.
        ConfigError: a transform that cannot be found.
    """
    data = config.data
    with world.together("finding the transform"):
        transform = find("data.transform", data.transform, BUILT_IN) if data.transform else None
        if len(data.fields) < 2 and not data.transform:
            raise ConfigError(
                f"data.fields = {list(data.fields)}: the model takes the first field and the loss the second. "
                f"Name two, or give a data.transform that makes two."
            )
    fraction = data.validation_fraction
    training = HDF5Loader(
        data.train,
        data.fields,
        data.global_batch,
        config.run.seed,
        world,
        shuffle=data.shuffle,
        lanes=data.lanes or None,
        mixing_chunks=data.mixing_chunks,
        split=("train", fraction) if fraction else None,
        transform=transform,
    )
    if not data.validation and not fraction:
        return training, None
    paths = data.validation or data.train
    held_out = (
        world.from_root(lambda: describe(paths, data.fields).num_rows)
        if data.validation
        else training.dataset.num_rows - training.num_samples
    )
    evaluation = HDF5Loader(
        paths,
        data.fields,
        min(data.global_batch, held_out),
        config.run.seed,
        world,
        shuffle="none",
        split=None if data.validation else ("validation", fraction),
        transform=transform,
    )
    return training, evaluation
