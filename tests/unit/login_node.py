"""A login node for tests: the command line in a process that can import some packages only."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CODE = """
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden}:
            raise ModuleNotFoundError(f"this login node has no {{name}}")

sys.meta_path.insert(0, Forbid())
from mpidp.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_without(forbidden: Sequence[str], *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `mpidp WORDS` where these packages cannot be imported."""
    code = _CODE.format(forbidden=tuple(forbidden))
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=folder)
