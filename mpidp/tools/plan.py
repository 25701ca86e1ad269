"""The plan of a run: the batches, shards, buckets and memory that a configuration and a number of ranks give.

Behind `mpidp train --dry-run`. Nothing here starts MPI: shards and buckets are arithmetic, so a laptop can
tell what a thousand ranks would do.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import nn

from mpidp.config import RunConfig
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.order import Order
from mpidp.reduce.buckets import BucketLayout, bucket_layout
from mpidp.tools.table import size_text, table
from mpidp.train.components import field_specs_of
from mpidp.train.sharded_state import check_divisible
from mpidp.world.world import World

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

STEPS_SHOWN = 3
BUCKETS_SHOWN = 20
# Square, because some optimizers take matrices only; large against the scalars that optimizers keep besides.
SAMPLE_SIDE = 64


def plan(config: RunConfig, model: nn.Module, make_optimizer: MakeOptimizer, ranks: int) -> str:
    """Describe the shards, buckets and memory of a run on so many ranks.

    `model` is the run's model and `make_optimizer` builds its optimizer over a given module's parameters.
    Reads the headers of the training files; raises `DataError` if they cannot be used, and `MpidpError` for an
    optimizer that the run would refuse, or that is to be sharded and cannot be.
    """
    optimizer = make_optimizer(model)
    if config.optimizer.sharded:
        check_divisible(optimizer)
    loader = _training_loader(config)
    order = loader.order
    counts = {step: _samples_per_rank(order, step, ranks) for step in _steps_shown(order.steps())}
    buckets = _buckets(model, config.reduce.bucket_bytes)
    batch_bytes = max(map(max, counts.values())) * loader.dataset.row_bytes
    return "\n\n".join(
        [
            _samples_text(order, ranks),
            _shards_text(counts),
            _buckets_text(buckets),
            _memory_text(model, buckets, _state_share(config, ranks) * state_ratio(make_optimizer), batch_bytes),
        ]
    )


def state_ratio(make_optimizer: MakeOptimizer) -> float:
    """Return the bytes of optimizer state per byte of parameters: 2 for Adam, 0 for plain SGD.

    It is measured, so that it holds for any optimizer: one step on one small square matrix.
    """
    module = nn.Linear(SAMPLE_SIDE, SAMPLE_SIDE, bias=False)
    sample = module.weight
    optimizer = make_optimizer(module)

    def closure() -> float:
        optimizer.zero_grad()
        loss = sample.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)
    held = [value for state in optimizer.state.values() for value in state.values()]
    num_bytes = sum(value.nbytes for value in held if isinstance(value, torch.Tensor) and value.dim() > 0)
    return num_bytes / sample.nbytes


def _state_share(config: RunConfig, ranks: int) -> float:
    """Return which part of the optimizer's state a rank keeps; two shares with fault_tolerance = "shrink"."""
    copies = 2 if config.train.fault_tolerance == "shrink" else 1
    return min(1.0, copies / ranks) if config.optimizer.sharded else 1.0


def _training_loader(config: RunConfig) -> HDF5Loader:
    data = config.data
    return HDF5Loader(
        data.train,
        field_specs_of(data),
        data.global_batch,
        seed=config.run.seed,
        world=World.alone(),
        shuffle=data.shuffle,
        streams=data.streams or None,
        mixing_chunks=data.mixing_chunks or None,
        memory_bytes=data.memory_bytes or None,
        allow_holes=data.allow_holes,
        split=("train", data.validation_fraction) if data.validation_fraction else None,
        drop_last=data.drop_last,
    )


def _steps_shown(steps: int) -> list[int]:
    """Return the first steps and the last, which may be short."""
    return sorted({*range(min(STEPS_SHOWN, steps)), steps - 1})


def _samples_per_rank(order: Order, step: int, ranks: int) -> list[int]:
    epoch = order.plan(0)
    position = step * order.global_batch
    return [len(epoch.local_indices(position, ranks, rank)) for rank in range(ranks)]


def _samples_text(order: Order, ranks: int) -> str:
    lines = [
        f"plan for {ranks} {'rank' if ranks == 1 else 'ranks'}",
        f"  samples         {order.num_samples} in {len(order.chunk_rows)} chunks",
        f"  global batch    {order.global_batch}",
        f"  steps an epoch  {order.steps()}{_left_out(order)}",
        f"  order           {order.shuffle}",
    ]
    if order.shuffle == "streams":
        lines[-1] += f": {order.streams} streams, {order.mixing_chunks} chunks of a stream mixed"
    return "\n".join(lines)


def _left_out(order: Order) -> str:
    rest = order.num_samples - order.end()
    return f"; {rest} {'sample is' if rest == 1 else 'samples are'} left out (drop_last)" if rest else ""


def _shards_text(counts: dict[int, list[int]]) -> str:
    rows = [
        (step, sum(per_rank), min(per_rank), max(per_rank), per_rank.count(0), ", ".join(_runs(per_rank)))
        for step, per_rank in counts.items()
    ]
    header = ("step", "samples", "min", "max", "idle ranks", "samples of each rank")
    return "shards of the first epoch\n" + table(header, rows)


def _runs(per_rank: Sequence[int]) -> Iterator[str]:
    """Name neighbouring ranks with equal counts together: "0-3: 16"."""
    first = 0
    for count, run in groupby(per_rank):
        last = first + len(list(run)) - 1
        yield f"{first}: {count}" if first == last else f"{first}-{last}: {count}"
        first = last + 1


def _buckets(model: nn.Module, bucket_bytes: int) -> list[BucketLayout]:
    # Backward finishes parameters in about the reverse of the order in which the model lists them.
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
    return bucket_layout(trainable, bucket_bytes)


def _buckets_text(buckets: Sequence[BucketLayout]) -> str:
    rows = [
        (number, str(bucket.dtype).removeprefix("torch."), len(bucket.slots), bucket.numel, size_text(bucket.num_bytes))
        for number, bucket in enumerate(buckets[:BUCKETS_SHOWN])
    ]
    hidden = buckets[BUCKETS_SHOWN:]
    rest = f"\n  and {len(hidden)} more of {size_text(sum(b.num_bytes for b in hidden))}" if hidden else ""
    header = ("bucket", "dtype", "parameters", "elements", "size")
    return "gradient buckets, summed over the ranks in every step\n" + table(header, rows) + rest


def _memory_text(model: nn.Module, buckets: Sequence[BucketLayout], ratio: float, batch_bytes: int) -> str:
    trainable = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    parts = [
        ("parameters", parameters),
        ("buffers", sum(buffer.nbytes for buffer in model.buffers())),
        ("gradients", sum(bucket.num_bytes for bucket in buckets)),
        ("optimizer state", round(ratio * trainable)),
        ("largest batch", batch_bytes),
    ]
    rows = [(name, size_text(size)) for name, size in [*parts, ("sum", sum(size for _, size in parts))]]
    return "memory of a rank; activations and read-ahead come on top\n" + table(("part", "size"), rows)
