"""Every script of examples/ runs on 1 and 3 ranks and prints the same results on both (Behaviours 1 and 50)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# Script -> what comes before it, its arguments, and what its last line shows after training.
HOW: dict[str, tuple[str, list[str], str]] = {
    "image_classification.py": ("", ["--epochs=2"], r"best loss 0\.\d+, saved in runs/images/best.pt"),
    "gpt_text.py": ("", ["--text=README.md", "--epochs=2"], r"The ranks .*"),
    "gridded_field.py": ("", ["--epochs=2"], r"epoch 2: error [01]\.\d+ K a step"),
    "variable_length.py": ("", ["--epochs=3"], r"epoch 3: (9\d\.\d|100\.0)% of 12,\d+ tokens are right"),
    "gan.py": ("", ["--epochs=1"], r"epoch 1: loss of the judge 1\.\d+, of the maker 0\.\d+"),
    "ragged_sets.py": ("", ["--epochs=3"], r"epoch 3: [89]\d\.\d% of 801 sets are right"),
    "evaluate.py": ("image_classification.py", [], r"( *\d+){10}"),
    "sweep.py": ("", ["--epochs=1"], r"task 4: lr 0\.01, global batch 32: accuracy [89]\d\.\d\d%"),
}
pytestmark = [pytest.mark.job, pytest.mark.timeout(300)]


def output(script: str, words: list[str], ranks: int, cwd: Path) -> list[str]:
    """The lines that a script prints under mpiexec, without what the library logs."""
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks), sys.executable, "-W", "error"]
    done = subprocess.run(
        [*launcher, f"examples/{script}", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SLURM_ARRAY_TASK_ID": "4"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the examples and their data."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data/digits.h5", tmp_path / "data")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_every_example_is_tested() -> None:
    assert set(SCRIPTS) == set(HOW)
    for name in SCRIPTS:
        text = (ROOT / "examples" / name).read_text()
        assert len(text.splitlines()) < 120, name
        assert f"examples/{name}" in (text.split('"""')[1]), f"{name} does not say how it is started"


@pytest.mark.parametrize("script", HOW)
def test_an_example(script: str, place: Path) -> None:
    before, words, last = HOW[script]
    if before:
        output(before, HOW[before][1], 2, place)
    alone = output(script, words, 1, place)
    for folder in (place / "runs").glob("images" if not before else "none"):
        shutil.rmtree(folder)  # which the next run would go on with
    shared = output(script, words, 3, place)
    results = [line for line in shared if re.match("epoch|best|task|[0-9 ]", line)]
    assert results == [line for line in alone if re.match("epoch|best|task|[0-9 ]", line)]
    assert results and re.fullmatch(last, shared[-1] if script != "gpt_text.py" else shared[2], re.DOTALL), shared
