"""The pictures of the pages are drawn from real runs (Behaviour 50)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_commands import ROOT


@pytest.mark.longer
@pytest.mark.timeout(120)
def test_pictures_of_a_step(tmp_path: Path) -> None:
    """The script compares the mean of three gradients with that of the wrapper before it draws."""
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data/digits.h5", tmp_path / "data")
    script = shutil.copy(ROOT / "docs/pictures/data_parallel.py", tmp_path)
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", "3", sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = {path.name: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert drawn.keys() == {"samples.png", "gradients.png"} and min(drawn.values()) > 5000
