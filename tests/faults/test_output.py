"""Standard output belongs to the program; what the library has to say is on standard error, and can be set up."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_workplace

from jobs import ROOT, run_job

# The command line prints; the library does not. (Those with a main of their own are run as children, and asked.)
PRINTING = ("cli.py", "tools/", "train/records/progress.py", "train/components.py")
CHILDREN = ("world/library.py", "world/device.py", "hdf5/files/library.py")

LOOP = """
import logging, sys
import torch
import mpidp
from mpidp.train.checkpoint.saver import Saver
{before}
world = mpidp.init()
assert mpidp.init() is world
{after}
mpidp.Elastic(world)
model = mpidp.DataParallel(torch.nn.Linear(64, 10), world)
optimizer = mpidp.ShardedOptimizer(torch.optim.AdamW(model.parameters()), world)
saver = Saver(world, world.call_on_root(lambda: __import__("pathlib").Path(sys.argv[1])), keep=2)
loader = mpidp.HDF5Loader("data/digits.h5", ("x", "y"), 720, world=world)
for batch in model.batches(loader):
    loss = torch.nn.functional.cross_entropy(model(batch.x.flatten(1).float()), batch.y)
    batch.weigh(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    saver.save(world.status.step, lambda: {{"model": model.state_dict()}}, dict)
    saver.finish()
saver.close()
if world.rank == 0:
    print("result 42")
"""
SAID = "mpidp: reducer "
SETTINGS = {
    "nothing": ("", "", 1),
    "a level before": ("logging.getLogger('mpidp').setLevel(logging.WARNING)", "", 0),
    "a level after": ("", "logging.getLogger('mpidp').setLevel(logging.WARNING)", 0),
    "a handler before": ("logging.getLogger('mpidp').addHandler(logging.NullHandler())", "", 0),
    "the root logger before": ("logging.basicConfig(level='INFO', format='mine: mpidp: %(message)s')", "", 1),
    "the root logger after": ("", "logging.basicConfig(level='INFO', format='mine: mpidp: %(message)s')", 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.library] * (name == "nothing")) for name in SETTINGS]
)
def test_a_loop_has_standard_output_for_itself(tmp_path: Path, name: str) -> None:
    """Behaviour 55. What rank 0 says comes once, in the form that the program has chosen, or not at all."""
    before, after, times = SETTINGS[name]
    result = run_job(["-c", LOOP.format(before=before, after=after), tmp_path], 2, timeout_s=60)
    assert result.code == 0, result.output
    assert result.stdout.split() == ["result", "42"]
    assert result.stderr.count(SAID) == times, result.stderr
    assert ("mine: " + SAID in result.stderr) == ("root" in name)
    assert ("wrote" in result.stderr) == ("root" in name)  # this rank's own notes


@pytest.mark.library
def test_a_warning_is_heard_from_any_rank() -> None:
    """Once, and it says whose it is."""
    code = "import logging, mpidp; world = mpidp.init(); logging.getLogger('mpidp.rank').warning('odd %d', world.rank)"
    result = run_job(["-c", code], 2)
    assert result.code == 0 and not result.stdout, result.output
    lines = sorted(line for line in result.stderr.splitlines() if "odd" in line)
    assert len(lines) == 2 and lines[0].startswith("mpidp: [rank 1 of 2 on ") and lines[1] == "mpidp: odd 0"


def prints(path: Path) -> bool:
    """Whether a module names standard output, or calls `print` without naming another file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.startswith("sys.stdout.write") or (
                called == "print" and "file" not in [w.arg for w in node.keywords]
            ):
                return True
    return False


def test_only_the_command_line_prints() -> None:
    """Behaviour 55."""
    package = ROOT / "mpidp"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if prints(path)}
    assert not [name for name in found if not name.startswith((*PRINTING, *CHILDREN))]
    assert "cli.py" in found


COMMANDS = {
    "help": ["--help"],
    "inspect": ["data", "inspect", "data/digits.h5"],
    "settings": ["train", "jobs/digits.toml", "--help"],
    "plan": ["train", "jobs/digits.toml", "--dry-run"],
    "submit": ["submit", "jobs/digits.toml", "--nodes=1", "--ranks-per-node=2", "--dry-run"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_goes_away(name: str) -> None:
    """`mpidp ... | head` ends as other programs do that SIGPIPE ends, without a word."""
    words = [sys.executable, "-m", "mpidp", *COMMANDS[name]]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1" if name == "help" else "",
    }  # it fails as it prints, or at the end
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        job.stdout.close()
        said = job.stderr.read()
        assert (job.wait(60), said) == (141, "")


@pytest.mark.library
@pytest.mark.parametrize("redirection", ["| true", ">&-"])
def test_training_outlives_its_standard_output(tmp_path: Path, redirection: str) -> None:
    """Hours of work do not hang on a pipe: the records are in the run folder."""
    make_workplace(tmp_path)
    job = f"'{sys.executable}' -m mpidp train run.toml {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", job], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("mpidp: standard output has no reader any more") == redirection.startswith("|")
    assert (tmp_path / "runs/run/checkpoints/latest").exists()
