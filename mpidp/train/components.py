"""The model, optimizer, data and other objects that a run file names, constructed from it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mpidp.config import DataSection, LossSection, ModelSection, OptimizerSection, RunConfig, SchedulerSection, to_toml
from mpidp.errors import ConfigError, DataError
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.files.describe import describe
from mpidp.hdf5.loader import HDF5Loader
from mpidp.models import BUILT_IN as MODELS
from mpidp.printable import listed, shown
from mpidp.train.losses import LOSSES, Loss, make_loss
from mpidp.train.precision import parameter_dtype
from mpidp.train.schedule import SCHEDULES

if TYPE_CHECKING:
    from mpidp.train.data_parallel import DataParallel
    from mpidp.world.world import World


def find(key: str, name: str, built_in: Mapping[str, str]) -> Callable[..., Any]:
    """Resolves a name. A user's own module may lie in the current folder, unless Python is told to be safe (-P).

    Args:
        key: where the name stands in the run file, for messages, e.g. "model.name".
        name: a key of `built_in`, or "module:function".
        built_in: name -> "module:function".

    Raises:
        ConfigError: an unknown name; a module that cannot be imported; a function it does not have.
    """
    place = built_in.get(name, name)
    if ":" not in place:
        close = difflib.get_close_matches(name, built_in, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = f" Built in: {listed(built_in)}; or give" if built_in else " Give"
        raise ConfigError(f"{key} = {name!r} is unknown.{hint}{known} module:function.")
    module_name, function_name = place.split(":", 1)
    is_own = name not in built_in
    if is_own and not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")  # a console script, unlike `python -m`, does not search the current folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"{key} = {name!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}. "
            f"It is looked for {_places()}."
        ) from error
    target: Any = module
    for part in function_name.split("."):
        if not hasattr(target, part):
            close = difflib.get_close_matches(part, dir(target), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{key} = {name!r}: module {module_name!r} has no {function_name!r}.{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{key} = {name!r} is a {type(target).__name__}, not something to call.")
    return target  # type: ignore[no-any-return]


def _places() -> str:
    """A text that says where Python looks for modules."""
    if sys.flags.safe_path:
        return "where Python finds packages, not in the current folder (python -P, or PYTHONSAFEPATH is set)"
    return "in the current folder and where Python finds packages"


def call(key: str, function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Calls what `find` found; arguments that it does not take, or torch's own refuse, become a ConfigError."""
    try:
        return function(*args, **arguments)
    except (TypeError, ValueError) as error:
        is_torchs = str(getattr(function, "__module__", "")).startswith("torch.") and isinstance(error, ValueError)
        if not is_torchs and (isinstance(error, ValueError) or _takes(function, args, arguments)):
            raise  # a bug inside the function, not in its arguments
        given = listed(f"{name}={shown(value)}" for name, value in arguments.items()) or "none"
        raise ConfigError(f"{key}: {error}. Arguments given: {given}.") from error


def _takes(function: Callable[..., Any], args: tuple[Any, ...], arguments: Mapping[str, Any]) -> bool:
    """Whether the function's signature accepts these arguments; False if it has no signature."""
    try:
        inspect.signature(function).bind(*args, **arguments)
    except (TypeError, ValueError):
        return False
    return True


def build_model(config: RunConfig) -> nn.Module:
    """The model on the CPU, its initial weights drawn from `run.seed`, in the dtype of `train.precision`.

    Raises:
        ConfigError: it cannot be imported, does not take its arguments, or is no torch.nn.Module.
    """
    section: ModelSection = config.model
    function = find("model.name", section.name, MODELS)
    torch.manual_seed(config.run.seed)
    model = call(f"model {section.name!r}", function, **section.arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name = {section.name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model.to(parameter_dtype(config.train.precision))


def build_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """A class of torch.optim by name, or the user's own, over the model's trainable parameters.

    Raises:
        ConfigError: it cannot be found, does not accept its arguments, or needs what the training loop does not
            provide.
    """
    built_in = _classes(torch.optim, torch.optim.Optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    function = find("optimizer.name", section.name, built_in)
    optimizer = call(f"optimizer {section.name!r}", function, parameters, lr=section.lr, **section.arguments)
    _check_steps(section.name, optimizer)
    return cast(torch.optim.Optimizer, optimizer)


def _check_steps(name: str, optimizer: Any) -> None:
    """Raises ConfigError for an optimizer that the loop of `mpidp train` cannot step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer.name = {name!r}: its step calls a closure, which computes the loss again as often as it likes, "
            f"and mpidp train computes it once a step. Choose another, or write a loop of your own, in which the "
            f"closure returns the mean loss over all ranks (docs/decisions/0020-what-a-run-file-cannot-train.md)."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            f"optimizer.name = {name!r} steps sparse gradients only, and those are not reduced. Use Adam, and "
            f"sparse=False in the model."
        )


def build_scheduler(
    section: SchedulerSection, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """A schedule by name, or the user's own, stepped once an optimizer step.

    Args:
        section: of the run file.
        optimizer: whose learning rates it sets.
        total_steps: steps of the whole training, which "warmup_cosine" takes unless its arguments have other ones.
    """
    if not section.name:
        return None
    built_in = _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    function = find("scheduler.name", section.name, built_in | SCHEDULES)
    arguments = ({"total_steps": total_steps} if section.name in SCHEDULES else {}) | section.arguments
    return cast(
        torch.optim.lr_scheduler.LRScheduler,
        call(f"scheduler {section.name!r}", function, optimizer, **arguments),
    )


def _classes(module: Any, base: type) -> dict[str, str]:
    """Name -> place of every public class of a module that derives from `base`."""
    return {
        name: f"{module.__name__}:{name}"
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


def build_loss(section: LossSection, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Loss:
    """The loss of the run file; lists among its arguments become tensors of this dtype on this device.

    Raises:
        ConfigError: it cannot be found, or does not take its arguments.
    """
    function = find("loss.name", section.name, LOSSES)
    return make_loss(section.name, function, section.arguments, dtype, torch.device(device))


OnEnd = Callable[[nn.Module, RunConfig], object]
ON_END = {"sample_text": "mpidp.train.components:sample_text"}
SAMPLE_BYTES = 400


def sample_text(model: nn.Module, config: RunConfig) -> None:
    """Prints text that a byte-level language model writes, from the run's seed."""
    generate = getattr(model, "generate", None)
    if generate is None:
        raise ConfigError(f"train.on_end = 'sample_text': model {config.model.name!r} has no method generate")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(config.run.seed)
    prompt = torch.tensor([[ord("\n")]], device=device)
    model.eval()
    tokens = generate(prompt, SAMPLE_BYTES, temperature=0.8, generator=generator)
    text = bytes(tokens[0].tolist()).decode(errors="replace").strip()
    print(f"A sample of what the model writes:\n\n{text}\n", flush=True)


def build_on_end(config: RunConfig) -> OnEnd | None:
    """The function of the run file, called as `function(model, config)` on rank 0 after training; None for none."""
    return find("train.on_end", config.train.on_end, ON_END) if config.train.on_end else None


TRANSFORMS = {
    "image": "mpidp.train.components:image",
    "next_token": "mpidp.train.components:next_token",
}


def image(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Byte images (N, H, W) in the first field become float32 (N, 1, H, W) in [0, 1]; labels become int64."""
    first, *rest = fields
    pixels = fields[first]
    if pixels.dim() != 3:
        raise DataError(
            f"transform 'image' wants field {first!r} of shape (N, height, width), found {tuple(pixels.shape)}"
        )
    changed = {first: (pixels.unsqueeze(1) / 255).float()}
    return changed | {name: fields[name].long() for name in rest}


def next_token(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Windows of tokens (N, T + 1) become `input` and `target` (N, T), int64, the target one token ahead."""
    if len(fields) != 1:
        raise DataError(f"transform 'next_token' wants one field of token windows, found {listed(fields)}")
    tokens = next(iter(fields.values())).long()
    return {"input": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}


def build_loaders(config: RunConfig, world: World) -> tuple[HDF5Loader, HDF5Loader | None]:
    """Opens the data. The second loader reads every held-out sample once, in file order. Collective.

    Raises:
        DataError: files, datasets or sizes that cannot be used.
        ConfigError: a transform or decode function that cannot be found.
    """
    data = config.data
    with world.raise_on_all_ranks("finding the functions that the data section names"):
        transform = find("data.transform", data.transform, TRANSFORMS) if data.transform else None
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
        streams=data.streams or None,
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


def wrap_model(module: torch.nn.Module, world: World, config: RunConfig) -> DataParallel:
    """Wraps the model in `DataParallel` with the settings of the run file. Collective."""
    section = config.reduce
    from mpidp.train.data_parallel import DataParallel  # imports MPI, which planning a run must not

    return DataParallel(
        module,
        world,
        reducer=section.reducer,
        bucket_bytes=section.bucket_bytes,
        comm_dtype=section.comm_dtype,
        error_feedback=section.error_feedback,
        piece_bytes=section.piece_bytes,
        overlap={"auto": None, "on": True, "off": False}[section.overlap],
        check_finite=section.check_finite and config.train.precision != "fp16",  # GradScaler leaves out the step
        compare_steps=config.watch.compare_steps,
        quiet=True,
    )


def ignored_settings(config: RunConfig, saved: str) -> list[str]:
    """Settings of optimizer and scheduler that differ from the checkpoint's, which are part of their saved state.

    Of a schedule of `SCHEDULES` only the number of steps is.
    """
    before, now = tomllib.loads(saved), tomllib.loads(to_toml(config))
    return [
        f"{section}.{key}"
        for section in ("optimizer", *(() if config.scheduler.name in SCHEDULES else ("scheduler",)))
        for key in sorted({*before[section], *now[section]})
        if before[section].get(key) != now[section].get(key) and key != "sharded"
    ]
