"""The configuration of a run: its sections, the values they allow, and the reading of run files.

Defaults < file < command line (`mpidp.tools.train`). The text under each field is its help on the command line.
Relative paths are relative to the current folder.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from mpidp import toml

Arguments = dict[str, Any]  # keyword arguments by name: strings, numbers, booleans, and lists of these


@dataclasses.dataclass(frozen=True)
class Check:
    """Which values of a setting are allowed, and the text for errors; part of the annotated type of the setting."""

    is_allowed: Callable[[Any], bool]
    allowed: str


_NAME = re.compile(r"[^\W\d]\w*(\.\w+)*(:[^\W\d]\w*(\.\w+)*)?")
_Count = Annotated[int, Check(lambda value: value >= 0, "an integer of at least 0")]
_Positive = Annotated[int, Check(lambda value: value >= 1, "an integer of at least 1")]
_PositiveNumber = Annotated[float, Check(lambda value: value > 0 and math.isfinite(value), "a positive number")]
_NotNegative = Annotated[float, Check(lambda value: value >= 0 and math.isfinite(value), "a number of at least 0")]
_Name = Annotated[str, Check(lambda name: bool(_NAME.fullmatch(name)), "a built-in name or module:function")]
_OptionalName = Annotated[
    str, Check(lambda name: not name or bool(_NAME.fullmatch(name)), "a built-in name or module:function, or empty")
]
_FILES = Check(lambda files: bool(files) and "" not in files, "at least one HDF5 file")
_FIELDS = Check(lambda names: 0 < len(names) == len(set(names)) and "" not in names, "at least one dataset, each once")
# A run's name becomes a folder, a log file, a line of a batch script and a word of commands that people copy. Names of
# files may have 255 bytes, and numbers are put behind it.
_RUN_NAME = Check(
    lambda name: bool(re.fullmatch(r"\w([\w .,+=@-]*[\w.,+=@-])?", name)) and len(name.encode()) <= 200,
    "letters, digits, inner spaces and any of _ . , + = @ -, beginning with a letter, a digit or _, of at most 200 "
    "bytes",
)


@dataclasses.dataclass(frozen=True)
class RunSection:
    """Name, folder and seed of the run."""

    name: Annotated[str, _RUN_NAME] = "run"
    """Name of the run; its folder is FOLDER/NAME, never overwritten."""
    folder: Annotated[str, Check(bool, "a folder")] = "runs"
    """Folder that holds the run folders; made if absent."""
    seed: _Count = 0
    """Seed of initial weights, sample order and split."""

    @property
    def parent(self) -> Path:
        """The folder that holds the run folders, "~" expanded."""
        return Path(os.path.expanduser(self.folder))


@dataclasses.dataclass(frozen=True)
class FieldSection:
    """How one of data.fields is read from a dataset, if not as it is stored."""

    dataset: str = ""
    """Dataset in the files; empty for the one of the field's name."""
    member: str = ""
    """Member of a compound type; empty for none."""
    axis: int = 0
    """Axis of the dataset that counts the samples; -1 for the last."""
    dtype: str = ""
    """Dtype in batches, such as float32 or bfloat16; empty for the stored one."""
    scale: float = 1.0
    """Stored values are multiplied by this."""
    offset: float = 0.0
    """Then this is added."""
    decode: str = ""
    """module:function that turns an array of stored values (strings, compounds) into numbers; empty for none."""
    cf: bool = False
    """Whether attributes of netCDF (_FillValue, scale_factor, ...) are honoured: unpacked values, NaN where missing."""


@dataclasses.dataclass(frozen=True)
class DataSection:
    """HDF5 files and the order in which their samples are read."""

    train: Annotated[tuple[str, ...], _FILES] = ()
    """HDF5 files to train on; several are read as one data set."""
    validation: Annotated[tuple[str, ...], Check(lambda files: "" not in files, "HDF5 files, or none")] = ()
    """HDF5 files to evaluate on after each epoch."""
    validation_fraction: Annotated[float, Check(lambda share: 0 <= share < 1, "a number in [0, 1)")] = 0.0
    """Share of the training samples set aside for evaluation, in [0, 1); instead of validation files."""
    fields: Annotated[tuple[str, ...], _FIELDS] = ("x", "y")
    """Datasets in the files that make up a sample, in the order the model and the loss take them."""
    global_batch: _Positive = 64
    """Samples of one optimizer step over all ranks; more ranks change speed, not the model."""
    drop_last: bool = False
    """Leave out an epoch's last step if it has fewer than global_batch samples; evaluation still takes all."""
    shuffle: Literal["auto", "streams", "full", "none"] = "auto"
    """Order of samples: streams (whole chunks, mixed; fast), full (uniform; slow on chunks of many samples), none; auto
    is full where samples are large and can be read alone, else streams."""
    streams: _Count = 0
    """Streams of the shuffled order; 0 chooses from the file, never from the number of ranks."""
    mixing_chunks: _Count = 0
    """Chunks of a stream whose rows are mixed with each other; 0 chooses from the file and memory_bytes."""
    mode: Literal["stream", "node", "store", "stage"] = "stream"
    """Where rows come from: the files, a decoded copy in each node's memory, the memory of all ranks, copied files."""
    stage_folder: str = ""
    """Folder on each node for mode stage; empty for the job's temporary folder."""
    memory_bytes: _Count = 0
    """Bytes of a node's memory for rows read ahead; 0 for an eighth of it, at most 2 GiB."""
    threads: _Count = 0
    """Threads of each rank that decode; 0 for as many as it has cores."""
    allow_holes: bool = False
    """Let chunks that were never written read as the dataset's fill value."""
    accept_changed: bool = False
    """Resume although the training files hold other rows, chunks or values than before; the epoch begins anew."""
    transform: _OptionalName = ""
    """Built-in transform of a batch, or module:function; empty for none."""
    sample_transform: _OptionalName = ""
    """module:function that is given one sample and a random generator; empty for none."""
    field: dict[str, FieldSection] = dataclasses.field(default_factory=dict)
    """For each of data.fields that is not taken as it is stored: the table data.field.NAME."""


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The model; the table model.arguments holds its keyword arguments."""

    name: _Name = ""
    """Built-in model, or module:function that returns a torch.nn.Module."""
    arguments: Arguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of the model, such as model.arguments.width."""


@dataclasses.dataclass(frozen=True)
class LossSection:
    """The loss; the table loss.arguments holds its keyword arguments."""

    name: _Name = "cross_entropy"
    """Function of torch.nn.functional, or module:function, that returns the mean loss of a batch."""
    arguments: Arguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of the loss."""


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """The optimizer; the table optimizer.arguments holds its other keyword arguments."""

    name: _Name = "AdamW"
    """Class of torch.optim, or module:class."""
    lr: _PositiveNumber = 1e-3
    """Learning rate."""
    sharded: bool = False
    """Keep on each rank only its share of the optimizer's state (ZeRO-1); the steps are the same."""
    arguments: Arguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of the optimizer, such as optimizer.arguments.weight_decay."""


@dataclasses.dataclass(frozen=True)
class SchedulerSection:
    """The learning-rate schedule; the table scheduler.arguments holds its keyword arguments."""

    name: _OptionalName = ""
    """warmup_cosine, a class of torch.optim.lr_scheduler, or module:class, stepped once a step; empty for none."""
    arguments: Arguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of the scheduler."""


_Metric = Literal["", "validation_loss", "validation_accuracy"]


@dataclasses.dataclass(frozen=True)
class EarlyStoppingSection:
    """When training stops before its last epoch."""

    metric: _Metric = ""
    """validation_loss or validation_accuracy of the evaluation after each epoch; empty for never."""
    patience_epochs: int = 5
    """Stop after so many epochs in a row without a better value."""
    min_delta: float = 0.0
    """A value is better if it differs from the best one by more than this."""


_STOPPING = Check(
    lambda table: table["patience_epochs"] >= 1 and table["min_delta"] >= 0 and math.isfinite(table["min_delta"]),
    "patience_epochs of at least 1, and min_delta of at least 0",
)


@dataclasses.dataclass(frozen=True)
class CallbackSection:
    """A callback; the table train.callbacks.NAME.arguments holds its keyword arguments."""

    name: str = ""
    """module:Class with methods on_start, on_step, on_epoch, on_end, at least one of them."""
    arguments: Arguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of the class."""


_CALLBACKS = Check(
    lambda tables: all(":" in table["name"] and _NAME.fullmatch(table["name"]) for table in tables.values()),
    'a name = "module:Class" in each table',
)


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """The training loop."""

    epochs: _Positive = 1
    """Passes over the training samples."""
    clip_norm: _NotNegative = 0.0
    """Largest norm of the averaged gradient; 0 for no clipping."""
    micro_batch: _Count = 0
    """Largest number of samples a rank computes at once, gradients accumulated; 0 for its whole share."""
    ema_decay: Annotated[float, Check(lambda decay: 0 <= decay < 1, "a number in [0, 1)")] = 0.0
    """Keep exponential moving averages of the weights, of which each step keeps this share, such as 0.999, and evaluate
    them; 0 for none."""
    sync_batch_norm: bool = False
    """Batch norm over the whole global batch instead of each rank's share of it; the model then needs such layers."""
    precision: Literal["float32", "bf16", "fp16", "float64"] = "float32"
    """Dtype of parameters and floating-point inputs; bf16 and fp16: float32, with autocast in the forward pass and, for
    fp16, scaled losses (a step whose gradients overflow is left out)."""
    threads: _Count = 0
    """CPU threads of torch on each rank; 0 shares the cores of the node among its ranks."""
    on_end: _OptionalName = ""
    """Built-in, or module:function, called on rank 0 at the end; empty for none."""
    callbacks: Annotated[dict[str, CallbackSection], _CALLBACKS] = dataclasses.field(default_factory=dict)
    """Objects that are called while training: for each the table train.callbacks.NAME."""
    early_stopping: Annotated[EarlyStoppingSection, _STOPPING] = EarlyStoppingSection()
    """When training stops before its last epoch: the table train.early_stopping."""
    fault_tolerance: Literal["abort", "shrink"] = "abort"
    """When a rank dies: end the job, or go on without it, where MPI can (docs/howto/fault_tolerance.md)."""
    min_ranks: _Positive = 1
    """With fewer ranks left the job ends, also with fault_tolerance = "shrink"."""


@dataclasses.dataclass(frozen=True)
class ReduceSection:
    """How gradients are averaged over ranks."""

    reducer: Literal["auto", "naive", "flat", "node", "staged", "null"] = "auto"
    """Reducer of the gradients; auto chooses one by the nodes and devices of the ranks, and logs which and why."""
    bucket_bytes: _Positive = 8 * 2**20
    """Size of a gradient bucket in bytes."""
    piece_bytes: _Count = 0
    """Largest buffer given to one call of MPI, in bytes; 0 chooses it by the network."""
    comm_dtype: Literal["full", "bf16", "fp16"] = "full"
    """Dtype in which float32 gradients are sent: full, or one of 16 bits, summed in float32."""
    error_feedback: bool = False
    """With 16-bit communication, add the rounding error to the gradient of the next step."""
    check_finite: bool = True
    """Stop, naming parameter and rank, when a gradient is infinite or NaN before it is summed; not with fp16."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Reduce while backward still runs; auto does so on several nodes and on GPUs."""


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """When to save and how many checkpoints to keep."""

    every_epochs: _Count = 1
    """Save after this many epochs; 0 for never."""
    every_steps: _Count = 0
    """Save after this many optimizer steps too; 0 for never."""
    keep: _Positive = 3
    """Newest checkpoints kept; older ones are deleted."""
    best: _Metric = ""
    """Keep the checkpoint with the lowest validation_loss, or highest validation_accuracy, too; empty for none."""
    background: bool = True
    """Go on training while files are written; training waits only for a copy of the state in memory."""
    on_failure: Literal["stop", "warn"] = "stop"
    """If a checkpoint cannot be written: stop all ranks, or warn and go on; the one before is kept."""


@dataclasses.dataclass(frozen=True)
class LogSection:
    """How often progress is reported."""

    every_steps: _Count = 10
    """Optimizer steps between two lines of metrics.jsonl; 0 for epochs only."""
    progress_s: _PositiveNumber = 2.0
    """Seconds between two progress reports on the terminal."""
    trace_steps: _Count = 0
    """Optimizer steps whose phases, waits and threads are written to trace.json, for all ranks; 0 for none."""
    trace_from: _Count = 10
    """Steps of each start that come before those."""


@dataclasses.dataclass(frozen=True)
class WatchSection:
    """Limits for the time that ranks wait for others, and the comparison of the ranks' models."""

    stall_warning_s: _NotNegative = 60.0
    """Seconds that ranks wait for others before a report says which are missing, and where; 0 for never."""
    stall_abort_s: _NotNegative = 600.0
    """Seconds before the job is ended; 0 for never."""
    compare_steps: _Count = 100
    """Steps in which all parameters, persistent buffers and optimizer state are compared over ranks; 0 for never."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All settings of a training run; each field is a section."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    loss: LossSection = dataclasses.field(default_factory=LossSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    scheduler: SchedulerSection = dataclasses.field(default_factory=SchedulerSection)
    train: TrainSection = TrainSection()
    reduce: ReduceSection = ReduceSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    watch: WatchSection = WatchSection()


def load(path: str | Path) -> RunConfig:
    """Read a run file over the defaults.

    Types and keys are checked here and values by `validate`, because the command line may still change them.
    Raises `ConfigError` naming the file and the line or key.
    """
    return from_dict(toml.read(Path(path)), source=str(path))


def from_dict(table: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Make a `RunConfig` from nested dicts over the defaults; errors name their origin, `source`."""
    return toml.into(RunConfig, table, source)


def to_toml(config: RunConfig) -> str:
    """Return the whole configuration, defaults included, as TOML text that `load` reads back equal."""
    table = dataclasses.asdict(config)
    for section in table.values():
        for name in ("arguments", "field", "callbacks"):
            if not section.get(name, True):
                del section[name]
    return toml.write(table)
