"""The words after `mpidp checkpoint list`, `verify` or `export` enter, an options dataclass leaves. Starts no MPI."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

Options = TypeVar("Options", bound="ListOptions | VerifyOptions | ExportOptions")

_Place = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_FOLDER")]


@dataclass(frozen=True)
class ListOptions:
    """List the checkpoints of a run, newest first, with what a look at names and sizes tells of each."""

    place: _Place
    """Folder of a run, its checkpoints folder, or one checkpoint."""


@dataclass(frozen=True)
class VerifyOptions:
    """Read every file of a run's checkpoints and compare it with its checksum; exit code 1 names what is damaged."""

    place: _Place
    """Folder of a run, its checkpoints folder, or one checkpoint."""


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of the newest whole checkpoint, or of the one that is given, as one file for other programs."""

    place: _Place
    """Folder of a run, its checkpoints folder, or one checkpoint."""
    output: Path | None = None
    """File to write, which must not exist; else model.pt or model.safetensors in the current folder."""
    format: Literal["torch", "safetensors"] = "torch"
    """torch: a state_dict that torch.load reads; safetensors: tensors only, needs the extra of that name."""
    optimizer: bool = False
    """Write the optimizer's state too."""


def parse(kind: type[Options], words: Sequence[str], console_outputs: bool = True) -> Options:
    """Read the words after `mpidp checkpoint list`, `verify` or `export`.

    Args:
        kind: the command's options.
        words: the command line's words.
        console_outputs: whether the parser prints help and errors.

    Raises:
        SystemExit: 0 after help, 2 after an error that the parser has printed.
    """
    name = {ListOptions: "list", VerifyOptions: "verify", ExportOptions: "export"}[kind]
    return tyro.cli(
        kind,
        prog=f"mpidp checkpoint {name}",
        args=words,
        console_outputs=console_outputs,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
