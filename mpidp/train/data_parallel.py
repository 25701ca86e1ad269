"""The class `DataParallel`: a module whose gradients are the mean over all ranks when `backward()` returns."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

import mpidp
from mpidp.errors import SHARED_MARK, CheckpointError, MpidpError
from mpidp.printable import listed
from mpidp.reduce.buckets import Buckets, Reducer
from mpidp.reduce.choice import Choice, Facts, choose, wants_overlap
from mpidp.reduce.transport import ReducerOptions
from mpidp.train.agreement import broadcast_module, check_same, check_supported, module_signature
from mpidp.train.batch_norm import Statistics, explain_batch_norm
from mpidp.train.gradient_sync import WRAP_ANEW, GradientSync
from mpidp.train.replicas import EVERY_STEPS
from mpidp.world import mpi
from mpidp.world.status import status
from mpidp.world.world import World

# DistributedDataParallel and torch.nn.DataParallel save the first, torch.compile the second.
PREFIXES = ("module.", "_orig_mod.")


def load_plain_state(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Loads a state as `module.load_state_dict` does. Not collective.

    If every key begins with the prefix of a wrapper of torch's, and no key of the module does, the prefix is left out:
    a checkpoint of `DistributedDataParallel(model).state_dict()` or of a compiled model loads as it is.

    Args:
        module: takes the state.
        state_dict: by the names of `module.state_dict()`; not changed.
        strict: whether it must have all names of the module and no others.

    Returns:
        What `module.load_state_dict` returns: missing and unexpected keys.

    Raises:
        CheckpointError: with `strict=False`, nothing of the state was loaded.
        RuntimeError: what torch raises for names or shapes that do not fit.
    """
    state_dict = _without_prefixes(module, state_dict)
    result = module.load_state_dict(state_dict, strict=strict)
    if not strict and len(result.unexpected_keys) >= len(state_dict):
        raise CheckpointError(
            f"load_state_dict(strict=False) loaded nothing: the state has {listed(state_dict, most=3) or 'no keys'}, "
            f"the model {type(module).__name__} has {listed(module.state_dict(), most=3) or 'no keys'}. Load this "
            f"model's state, or rename its keys "
            f"(torch.nn.modules.utils.consume_prefix_in_state_dict_if_present removes a prefix)."
        )
    return result


def _without_prefixes(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state without wrappers' prefixes that all of its keys have and none of the module's."""
    names = module.state_dict().keys()
    prefix = next((each for each in PREFIXES if state_dict and all(key.startswith(each) for key in state_dict)), None)
    if prefix is None or any(name.startswith(prefix) for name in names):
        return state_dict
    plain = OrderedDict((key.removeprefix(prefix), value) for key, value in state_dict.items())
    # What torch notes of each module, such as the version of its state: "", "module", "module.layer", ...
    notes = getattr(state_dict, "_metadata", {})
    inner = {key.removeprefix(prefix) if key + "." != prefix else "": note for key, note in notes.items() if key}
    plain._metadata = OrderedDict(inner)  # type: ignore[attr-defined]
    return _without_prefixes(module, plain)


T = TypeVar("T")

# Several buckets for a model of any size, so that the first leaves early, and each large enough for full bandwidth.
BUCKET_BYTES = 8 << 20


class DataParallel(nn.Module):
    """Wraps a module so that each rank trains it on its share of the global batch. Construction is collective.

        model = mpidp.DataParallel(Net().to(world.device), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for batch in model.batches(loader):
            batch.weigh(F.cross_entropy(model(batch.x), batch.y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    All ranks must have parameters of the same names, shapes and dtypes (checked); they get the values of rank 0.
    Afterwards, each time `backward()` returns outside `no_sync()`, every `p.grad` is the mean over ranks, and clipping,
    GradScaler and any optimizer work as on one GPU. A parameter that no rank used keeps `grad is None`; one that only
    some ranks used counts as zero on the others. Every rank must use at least one parameter, as its `backward()` takes
    part in the reduction. `forward` is not collective, with two exceptions: the first call after parameters were
    unfrozen, and layers of `SyncBatchNorm` in training, with which all ranks must call it equally often before each
    reduction.

    Optimizers of any class step reduced gradients only: gradients that were accumulated, or set by hand, are reduced
    first, and those that cannot be are an error that names the parameter. At each reduction the ranks compare their
    numbers of steps, places in the data and learning rates; over `compare_steps` steps also parameters, persistent
    buffers and optimizer state. So ranks that diverge raise an error, all of them.

    Training may go on after an exception of `backward()` only if all ranks catch it in the same step.

    A copy (`copy.deepcopy`, `AveragedModel`, `torch.save`) is a copy of the plain module and reduces nothing.

    Args:
        module: the model, on `world.device`.
        world: the ranks.
        reducer: "auto" (by the facts of this world), "naive", "flat", "node", "staged" or "null".
        bucket_bytes: size of a bucket, the buffer in which gradients are reduced.
        comm_dtype: "full", or "bf16" or "fp16": float32 gradients are sent in 16 bits and summed in float32.
        error_feedback: with 16-bit communication, add the rounding error to the gradient of the next step.
        piece_bytes: the largest buffer given to one call of MPI; 0 chooses it by the kind of network.
        overlap: reduce while backward still runs; None does so on several nodes and on GPUs.
        check_finite: raise FloatingPointError, on all ranks, naming parameter and rank, when a gradient is infinite or
            NaN before it is summed. Not for use with GradScaler, which expects such gradients and skips the step.
        compare_steps: the number of steps in which everything that must be equal on all ranks is compared once; 0 for
            never.
        quiet: do not log what "auto" chose; it is in `choice`.

    Attributes:
        module: the module.
        world: the ranks.
        choice: the reducer, and why it was chosen.
        overlap: whether gradients are reduced while backward still runs.

    Raises:
        MpidpError: no trainable parameter; sparse gradients; parameters off `world.device`.
        MismatchError: the ranks' modules or options differ.
        LaunchError: the reducer cannot work here.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        reducer: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        comm_dtype: str = "full",
        error_feedback: bool = False,
        piece_bytes: int = 0,
        overlap: bool | None = None,
        check_finite: bool = False,
        compare_steps: int = EVERY_STEPS,
        quiet: bool = False,
    ):
        super().__init__()
        self.module = module
        self.world = world
        with world.raise_on_all_ranks("wrapping the model"):
            check_supported(module, world)
        options = ReducerOptions(piece_bytes, comm_dtype, error_feedback, share_memory=not mpi.is_elastic())
        told = (
            f"reducer={reducer}, bucket_bytes={bucket_bytes}, overlap={overlap}, check_finite={check_finite}, "
            f"compare_steps={compare_steps}, {options}"
        )
        check_same(world, [told, *module_signature(module)], "the models")
        check_same(world, [f"mpidp {mpidp.__version__}, torch {torch.__version__}"], "the versions")
        broadcast_module(module, world)
        self.choice: Choice = choose(reducer, Facts.of(world), options)
        self.overlap = wants_overlap(world, self.choice) if overlap is None else overlap
        if reducer == "auto" and not quiet:
            world.log_once(f"reducer {self.choice}")
        self._sync = GradientSync(
            module,
            world,
            self.choice,
            bucket_bytes=bucket_bytes,
            overlap=self.overlap,
            check_finite=check_finite,
            compare_steps=compare_steps,
        )
        self._statistics = Statistics(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, with the same arguments and result."""
        if torch.is_grad_enabled():
            status.enter("forward")
            if any(parameter.requires_grad for parameter in self._sync.frozen):
                self._sync.restart()
        self._sync.lockstep.before_forward()
        try:
            output = self.module(*args, **kwargs)
        except Exception as error:
            self._sync.trouble = f"{type(error).__name__} in forward ({str(error).partition(chr(10))[0]})"
            too_few = explain_batch_norm(error, self.module, self.world)
            if too_few is not None:
                raise too_few from error
            raise
        self._statistics.count(self.training, args, kwargs)
        if torch.is_grad_enabled():
            self._sync.watch_output(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context manager: backward passes inside it only accumulate; the next one outside reduces the whole sum.

        What counts is where `backward()` runs, not where `forward` did. An optimizer step that finds gradients
        accumulated but not reduced reduces them first, so an accumulation cut short by the end of an epoch is right.
        To clip them in between, call `synchronize()` before.
        """
        before = self._sync.reduces
        self._sync.reduces = False
        try:
            yield
        finally:
            self._sync.reduces = before

    def synchronize(self) -> None:
        """Makes gradients the mean over ranks now. Collective. Does nothing when they already are.

        Gradients that were put into `p.grad` as other tensors, such as those of `torch.autograd.grad`, are reduced,
        too.

        Raises:
            MismatchError: on all ranks, they are not at the same step or batch, or have diverged.
        """
        if not self._sync.is_complete:
            self._sync.reduce()

    def fail(self, error: Exception) -> NoReturn:
        """Raises an error of this rank on all ranks, in the place of this step. Collective.

        The other ranks raise it in their `backward()` of this step. The model is unchanged then, so a program that
        catches the error on all ranks may go on, or save.

        With layers of `SyncBatchNorm` they raise it when they call the model. Once this rank has called it itself, they
        may be in any of its layers: then the error is raised here alone, which ends the job unless it is caught.

        Args:
            error: why this rank has no gradients in this step.

        Raises:
            Exception: always, `error`.
        """
        self._sync.lockstep.fail(error)
        self._sync.reduce(error)
        raise AssertionError("an error was shared and not raised") from error

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the batches of a loader; if it fails on one rank, all ranks raise the error, in that step.

        Without it, such a rank ends the job, as the others wait for it in the reduction. Every rank must take the same
        number of batches, and call `backward()` once for each.

        Args:
            loader: any iterable, such as an `HDF5Loader`.

        Raises:
            Exception: on all ranks, what the loader of the lowest failing rank raised.
        """
        iterator = iter(loader)
        while True:
            with status.during("data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                except Exception as error:
                    # All ranks know already, or the others wait for this one in the loader itself.
                    if getattr(error, SHARED_MARK, False) or getattr(loader, "mode", "") == "store":
                        raise
                    self.fail(error)
            yield batch

    def unwrap(self) -> nn.Module:
        """Removes hooks and buffers, and returns the plain module with its gradients. Collective.

        Raises:
            MismatchError: on all ranks, their parameters, buffers or optimizer states have diverged.
        """
        self._sync.close()
        return self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, without a prefix: it loads in plain torch. Not collective.

        Running statistics of batch norm are those of this rank's samples until `combine_statistics()` is called.
        """
        self._statistics.warn_if_apart("state_dict()", self.world)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of a plain module, or of one in torch's DistributedDataParallel. The same on every rank.

        Returns:
            What the module's own `load_state_dict` returns: missing and unexpected keys.

        Raises:
            CheckpointError: with `strict=False`, nothing of the state was loaded.
            MpidpError: `assign=True`, which would replace the parameters that are reduced.
        """
        if assign:
            raise MpidpError(f"load_state_dict(assign=True) replaces the parameters that are reduced. {WRAP_ANEW}")
        self._sync.replicas.restart()
        return load_plain_state(self.module, state_dict, strict)

    def combine_statistics(self) -> None:
        """Sets running statistics of batch norm to those over the samples of all ranks. Collective.

        To be called after training, before the model is evaluated or saved. The mean of the means and the variance
        about it are weighted by the numbers of samples that each rank has trained on since the last call. Without
        such layers, or with `SyncBatchNorm` only, nothing happens.
        """
        self._statistics.combine(self.world)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        """A copy, or what is read from a file, is the plain module."""
        return _plain, (self.module,)

    @property
    def num_samples_apart(self) -> int:
        """The number of samples this rank has trained on since running statistics were combined."""
        return self._statistics.num_samples

    @num_samples_apart.setter
    def num_samples_apart(self, number: int) -> None:
        self._statistics.num_samples = number

    def rank_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: rounding errors of 16-bit communication, and the layout they belong to."""
        return {"layout": self._layout(), "residuals": self._sync.residuals.tensors()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> bool:
        """Loads the rounding errors of `rank_state_dict()`; returns False if they belong to another layout.

        To be called before the first backward pass, on every rank. Not collective.
        """
        if state["layout"] != self._layout():
            return False
        self._sync.residuals.load(state["residuals"])
        return True

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own names, without a prefix."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own names, without a prefix."""
        return self.module.named_buffers(*args, **kwargs)

    @property
    def buckets(self) -> Buckets:
        """The flat gradient buffers."""
        return self._sync.buckets

    @property
    def reducer(self) -> Reducer:
        """The strategy that sums the buckets."""
        return self._sync.reducer

    @property
    def reduce_s(self) -> float:
        """Seconds that the training thread has spent so far in reducing, or in waiting for it."""
        return self._sync.seconds

    def _layout(self) -> str:
        """A text of everything that decides which elements each rank rounds to 16 bits."""
        world, buckets = self.world, self.buckets.buckets
        return (
            f"{world.size} ranks on {world.num_nodes} nodes, {self.choice.name}, {self.choice.options}, "
            f"buckets of {[bucket.layout.numel for bucket in buckets]}"
        )


def _plain(module: nn.Module) -> nn.Module:
    return module
