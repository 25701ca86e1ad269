"""The forward pass and the loss of a run on a batch, with one-line errors for inputs that they do not accept.

If the error passed through the user's own code, its traceback is needed: then it is raised with that line as a note.
"""

import json
import re
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpidp.config import RunConfig
from mpidp.errors import SHARED_MARK, DataError, MpidpError
from mpidp.hdf5.batch import Batch
from mpidp.train.batch_norm import explain_batch_norm
from mpidp.train.data_parallel import DataParallel
from mpidp.train.losses import ClassLoss, Loss
from mpidp.train.precision import Precision, parameter_dtype
from mpidp.world import mpi
from mpidp.world.exit import MEMORY_ADVICE, is_out_of_memory
from mpidp.world.status import status
from mpidp.world.world import World

# Modules below the trainer whose errors are explained; the rest of this package raises errors of its own.
_REFUSES = ("torch", "mpidp.models", "mpidp.train.losses")
_OF_TORCH = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


class Forward:
    """Computes the model's output and the loss of a run for a batch.

    Args:
        config: the run.
        model: the wrapped model.
        loss: returns the mean over the samples.
        precision: of inputs and computation.
    """

    def __init__(self, config: RunConfig, model: DataParallel, loss: Loss, precision: Precision):
        self._config, self._model, self._loss, self._precision = config, model, loss, precision

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The first two fields, floating-point ones in the dtype of the parameters."""
        dtype = self._precision.dtype
        first, second = batch[batch.fields[0]], batch[batch.fields[1]]
        return (
            first.to(dtype) if first.is_floating_point() else first,
            second.to(dtype) if second.is_floating_point() else second,
        )

    @property
    def ignored(self) -> int | None:
        """The class whose targets count nothing; None for none."""
        return self._loss.ignored if isinstance(self._loss, ClassLoss) else None

    def weight(self, target: Tensor) -> Tensor | None:
        """What the sum of the losses has to be divided by; None for the number of samples, as the loss does itself."""
        return self._loss.weight_of(target) if isinstance(self._loss, ClassLoss) else None

    def __call__(
        self, batch: Batch, inputs: Tensor, target: Tensor, averaged: nn.Module | None = None
    ) -> tuple[Any, Tensor]:
        """The output of the model, or of its averages, and the loss. In training all ranks raise what one refuses."""
        output = None
        try:
            with self._precision.autocast():
                output = (averaged or self._model)(inputs)
                loss = self._loss(output, target)
            if not isinstance(loss, Tensor) or loss.dim():
                raise DataError("the loss is no scalar: it has to return the mean over the samples.")
            return output, loss.float() if loss.element_size() < 4 else loss  # it is scaled and summed
        except Exception as error:
            fields = dict(zip(batch.fields, (inputs, target), strict=False))
            refused = explain(error, self._config, self._model.module, self._model.world, fields, output)
            if refused is None:
                raise
        if self._model.training:
            self._model.fail(refused)
        raise refused


def explain(
    error: Exception, config: RunConfig, model: nn.Module, world: World, fields: dict[str, Tensor], output: Any
) -> MpidpError | None:
    """The error to raise instead of `error`. Not collective.

    Args:
        error: what the model raised, or the loss.
        config: the run.
        model: without its wrapper.
        world: the ranks.
        fields: what they were given, by name: the model the first, the loss, if any, the second.
        output: what the model returned; None if it raised.

    Returns:
        None if `error` itself should be raised; it may have got a note.
    """
    if getattr(error, SHARED_MARK, False) or mpi.is_survived(error):
        return None
    if is_out_of_memory(error):
        return _out_of_memory(error, model, world, fields)
    if (too_few := explain_batch_norm(error, model, world)) is not None:
        return too_few
    if isinstance(error, MpidpError) and not isinstance(error, DataError):
        return error
    if not isinstance(error, (DataError, *_OF_TORCH)):
        return None
    field = list(fields)[0 if output is None else 1]
    given = f"Given {_when(model)}: {_given(config, fields, output)}."
    if isinstance(error, DataError):
        origin = "" if field in config.data.fields else f' The transform {config.data.transform} makes "{field}".'
        return DataError(f"{str(error).replace('[data.field.NAME]', _table(field))} {given}{origin}")
    places = _places(error)
    if not all(_is_in(place, ("torch", "mpidp")) for place in places):
        error.add_note(f"{given} {_advice(error, config, fields, field)}")
        return None
    if not _is_in(places[-1], _REFUSES):
        return None
    who = f"model {config.model.name}" if output is None else f"loss {config.loss.name}"
    return DataError(f"{who}: {_reason(error)}. {given} {_advice(error, config, fields, field)}")


def _out_of_memory(error: Exception, model: nn.Module, world: World, fields: dict[str, Tensor]) -> MpidpError:
    num_samples = len(next(iter(fields.values())))
    return MpidpError(
        f"rank {world.rank} of {world.size} ({world.host}) ran out of memory {_when(model)}, phase {status.phase}, "
        f"with {num_samples} samples at once: {_reason(error)}. {MEMORY_ADVICE}"
    )


def _when(model: nn.Module) -> str:
    return f"in step {status.step + 1:,}" if model.training else f"in the evaluation after step {status.step:,}"


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _places(error: Exception) -> list[str]:
    """The modules whose code the error passed, from the trainer to where it was raised."""
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_in(place: str, packages: Sequence[str]) -> bool:
    return any(place == package or place.startswith(f"{package}.") for package in packages)


def _given(config: RunConfig, fields: dict[str, Tensor], output: Any) -> str:
    first, *rest = (f'field "{name}" {_described(value)}' for name, value in fields.items())
    to_model = f"{first} to model {config.model.name}"
    if output is None:
        return to_model
    return f"{to_model}, output {_described(output)} and {rest[0]} to loss {config.loss.name}"


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    whole = not (value.is_floating_point() or value.is_complex())
    # After a failed kernel of a GPU no tensor there can be read.
    if whole and value.numel() and value.device.type == "cpu":
        text += f" from {int(value.min())} to {int(value.max())}"
    return text


def _advice(error: Exception, config: RunConfig, fields: dict[str, Tensor], field: str) -> str:
    """What to write in the run file; torch's messages about dtypes contain the word type."""
    if field not in config.data.fields:
        return f'The transform {config.data.transform} makes "{field}": change it there.'
    if "type" not in str(error):
        return f'Change the model (model.arguments), or "{field}" in a data.transform.'
    table, dtype = _table(field), str(parameter_dtype(config.train.precision)).removeprefix("torch.")
    if field != next(iter(fields)):
        return f'Write {table} dtype = "int64" for classes, "{dtype}" for other numbers.'
    if fields[field].is_floating_point():
        return f'For integers write {table} decode = "numpy:int64".'
    scale = f", for pixels from 0 to 1 also scale = {1 / 255:.6g}" if fields[field].dtype == torch.uint8 else ""
    return f'Write {table} dtype = "{dtype}"{scale}.'


def _table(field: str) -> str:
    """The field's table in a run file; a name with slashes needs quotes there."""
    return f"[data.field.{field if re.fullmatch(r'[A-Za-z0-9_-]+', field) else json.dumps(field)}]"
