"""docs/reference/formats.md and environment.md against a real run folder and the sources (Behaviours 50, 60)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from page_commands import ROOT
from test_commands import place, shell  # noqa: F401  (a fixture)

from mpidp import cli
from mpidp.tools import train

FORMATS = (ROOT / "docs/reference/formats.md").read_text()
ENVIRONMENT = (ROOT / "docs/reference/environment.md").read_text()


def first_cells(text: str, header: str) -> set[str]:
    """The names in code style in the first column of the table that is headed so."""
    table = text[text.index(f"| {header} |") :].split("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])}


@pytest.mark.timeout(200)
def test_a_real_run_folder(place: Path) -> None:  # noqa: F811
    done = shell("mpidp train jobs/digits.toml --train.epochs=1 --train.ema_decay=0.9", place)
    assert done.returncode == 0, done.stdout
    run = place / "runs/digits"
    files = first_cells(FORMATS, "file of a run folder | content")
    found = {path.relative_to(run).as_posix() for path in (*run.glob("*"), *run.glob("logs/*"), *run.glob("*/latest"))}
    assert found - {"logs", "checkpoints"} == files - {"checkpoints/step_00000120", "owner.json", "trace.json"}

    (start,) = json.loads((run / "env.json").read_text())
    assert start.keys() == first_cells(FORMATS[FORMATS.index("## `env.json`") :], "key | content")
    checkpoint = run / "checkpoints/latest"
    assert {path.name for path in checkpoint.iterdir()} == first_cells(FORMATS, "file | written by | content")
    for name in ("state.pt", "rank_00000.pt", "manifest.json"):
        path, section = checkpoint / name, FORMATS[FORMATS.index(f"Keys of `{name}`") :]
        held = json.loads(path.read_text()) if name.endswith("json") else torch.load(path, weights_only=True)
        assert held.keys() == first_cells(section, "key | content"), name


def test_exit_codes() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", ENVIRONMENT, re.MULTILINE)}
    assert {cli.DONE, cli.FAILED, cli.USAGE, cli.INTERRUPTED, cli.UNREAD, train.STOPPED_EARLY, 3} <= listed


def test_every_variable_that_is_read_is_listed() -> None:
    """Those that the package asks for by name; doctor's are on its page."""
    sources = [path for path in (ROOT / "mpidp").rglob("*.py") if "doctor" not in path.parts]
    asked = re.compile(r"""environ(?:ment)?(?:\.get\(|\[)["']([A-Z]\w+)["']|["']([A-Z]\w+)["'] (?:not )?in environ""")
    read = {name for path in sources for pair in asked.findall(path.read_text()) for name in pair if name}
    assert {"MPIDP_SHARE_GPU", "SLURM_JOB_ID"} <= read
    assert read <= set(re.findall(r"`([A-Z]\w+)`", ENVIRONMENT))
