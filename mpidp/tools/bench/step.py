"""`mpidp bench step`: the time of a training step of a reference model under each way to average gradients.

A step is what a training loop does: zero_grad, forward, backward with its reduction, an SGD step. The learning rate
is 0, which costs the same and keeps the weights, so that every step of every side must show the same gradients.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpidp.errors import MpidpError
from mpidp.models.gpt import gpt
from mpidp.models.mlp import mlp
from mpidp.reduce.choice import REDUCERS
from mpidp.tools.bench.allreduce import ddp, gloo
from mpidp.tools.bench.options import StepOptions, parse_variant
from mpidp.tools.bench.timing import Row, Side, Times, measure, report
from mpidp.train.data_parallel import DataParallel
from mpidp.world.mpi import MPI
from mpidp.world.start import init
from mpidp.world.world import World

SEED = 0


@dataclass(frozen=True)
class Workload:
    """A model, the same on all ranks, and this rank's own batch: inputs, and the class of each output row."""

    module: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Mean cross entropy over the batch (for tokens, over all of them)."""
        scores: Tensor = model(self.inputs)
        return functional.cross_entropy(scores.flatten(0, -2), self.targets.flatten())


def make_workload(name: str, scale: int, world: World) -> Workload:
    """The workload of that name, with `scale` times its usual batch; leaves torch's random state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        module = MODELS[name]().to(world.device)
        torch.manual_seed(SEED + 1 + world.rank)
        inputs, targets = BATCHES[name](scale)
    return Workload(module, inputs.to(world.device), targets.to(world.device))


VOCABULARY, CONTEXT = 4096, 64  # a transformer's tokens
FEATURES, CLASSES = 1024, 256  # the perceptron's


def _transformer() -> nn.Module:
    """21.05 million parameters."""
    return gpt(vocabulary=VOCABULARY, context=CONTEXT, layers=6, heads=8, width=512)


def _transformer_batch(sequences: int) -> tuple[Tensor, Tensor]:
    """As many tokens as a core of 2020 trains on in about 150 ms, which is about what summing the gradients takes."""
    tokens = torch.randint(VOCABULARY, (2, sequences, CONTEXT))
    return tokens[0], tokens[1]


def _mlp() -> nn.Module:
    """8.66 million parameters."""
    return mlp(inputs=FEATURES, hidden=(2048, 2048, 1024), classes=CLASSES)


def _mlp_batch(scale: int) -> tuple[Tensor, Tensor]:
    return torch.randn(64 * scale, FEATURES), torch.randint(CLASSES, (64 * scale,))


MODELS: dict[str, Callable[[], nn.Module]] = {"transformer": _transformer, "mlp": _mlp}
BATCHES: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {"transformer": _transformer_batch, "mlp": _mlp_batch}


NAMES = ("plain", "auto", *REDUCERS)
COLUMNS = {
    "median ms": ("median_s", 1e3),
    "min ms": ("min_s", 1e3),
    "max ms": ("max_s", 1e3),
    "reduce ms": ("reduce_s", 1e3),
    "exposed ms": ("exposed_s", 1e3),
    "efficiency": ("efficiency", 1.0),
}
UNREDUCED = ("null", "plain")  # what others are compared with, the first that is there

# Of a parameter's largest gradient: several roundings, and far from any wrong divisor.
RELATIVE_TOLERANCE = 1e-4


def bench_step(options: StepOptions) -> str:
    """Time training steps on all ranks and return the report: JSON in one line, or a table. Collective.

    Raises:
        ConfigError: an unknown name, before MPI is started.
        MpidpError: wrong gradients; a reducer that cannot work here.
    """
    for name in options.reducers:
        parse_variant(name, NAMES)
    world = init()
    with nullcontext() if options.against == "none" else gloo(world):
        rows = step_rows(options, world)
    return report("step", options, world, rows, COLUMNS)


def step_rows(options: StepOptions, world: World) -> list[Row]:
    """Measure the model's step under every name. Collective; inside `gloo` when DDP is asked for."""
    names = [*options.reducers, *(["ddp"] if options.against == "ddp" else [])]
    return compare_steps(make_workload(options.model, options.scale, world), names, options.repeats, world)


def compare_steps(workload: Workload, names: Sequence[str], repeats: int, world: World) -> list[Row]:
    """Measure a workload's step under every name, whose gradients are checked first. Collective."""
    local = local_gradients(workload)
    mean = mean_gradients(local, world)
    steps = [_Step(name, workload, world) for name in names]
    times = measure(world, [step.side(local if step.keeps_local else mean) for step in steps], repeats)
    baseline = next((times[name] for name in UNREDUCED if name in times), None)
    return [_row(step, times[step.name], baseline) for step in steps]


def local_gradients(workload: Workload) -> list[Tensor]:
    """This rank's own gradients, by plain torch."""
    module = deepcopy(workload.module)
    workload.loss(module).backward()  # type: ignore[no-untyped-call]
    return [_gradient(parameter) for parameter in module.parameters()]


def mean_gradients(local: Sequence[Tensor], world: World) -> list[Tensor]:
    """Their means over ranks, summed in float64 by none of the code that is measured. Collective."""
    means = []
    for gradient in local:
        total = gradient.to("cpu", torch.float64, copy=True)
        world.comm.Allreduce(MPI.IN_PLACE, total.numpy(), op=MPI.SUM)
        means.append((total / world.size).to(gradient))
    return means


class _Step:
    """One side: a copy of the model in its wrapper, and its optimizer. Construction is collective."""

    def __init__(self, name: str, workload: Workload, world: World):
        self.name = name
        self.workload = workload
        self.model = _wrap(name, deepcopy(workload.module), world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    @property
    def chosen(self) -> str | None:
        """The reducer that is at work."""
        return self.model.choice.name if isinstance(self.model, DataParallel) else None

    @property
    def keeps_local(self) -> bool:
        """Whether each rank keeps its own gradients."""
        return (self.chosen or self.name) in UNREDUCED

    def side(self, expected: Sequence[Tensor]) -> Side:
        """What is timed, and checked against the expected gradients."""
        return Side(self.name, lambda: None, self.run, partial(self._check, expected), meter=self._reduce_s)

    def run(self) -> None:
        """One training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.workload.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _reduce_s(self) -> float:
        return self.model.reduce_s if isinstance(self.model, DataParallel) else 0.0

    def _check(self, expected: Sequence[Tensor]) -> None:
        tolerance = RELATIVE_TOLERANCE
        if isinstance(self.model, DataParallel):
            # A contribution may be larger than the mean, by less than the number of ranks.
            tolerance += parse_variant(self.name, NAMES).tolerance * self.model.world.size
        for (name, parameter), right in zip(self.model.named_parameters(), expected, strict=True):
            error = (_gradient(parameter) - right).abs().max()
            if not error <= tolerance * right.abs().max():  # NaN is wrong, too
                raise MpidpError(
                    f"{self.name}: the gradient of {name} is off by up to {error.item():.3g}, where the right one "
                    f"reaches {right.abs().max().item():.3g}. Nothing was timed: times of wrong results mean nothing. "
                    f"Check this MPI library, or choose another reducer."
                )


def _row(step: _Step, times: Times, baseline: Times | None) -> Row:
    """Exposed time and efficiency are medians over repeats of each step against the baseline's of the same repeat."""
    pairs = list(zip(times.seconds, baseline.seconds, strict=True)) if baseline else []
    return {
        "name": step.name,
        "chosen": step.chosen,
        "bytes": sum(parameter.nbytes for parameter in step.model.parameters()),
        **times.summary(),
        "reduce_s": median(times.metered_s) if step.chosen else None,
        "exposed_s": median(mine - other for mine, other in pairs) if pairs else None,
        "efficiency": median(other / mine for mine, other in pairs) if pairs else None,
    }


def _wrap(name: str, module: nn.Module, world: World) -> nn.Module:
    if name == "plain":
        return module
    if name == "ddp":
        return ddp(module, world)
    variant = parse_variant(name, NAMES)
    return DataParallel(
        module, world, reducer=variant.reducer, comm_dtype=variant.comm_dtype, overlap=variant.overlap, quiet=True
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
