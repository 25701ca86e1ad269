"""docs/howto/migrate.md: both sides of its comparisons have the same losses, in file order (Behaviour 60)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_commands import ROOT
from test_commands import place, shell  # noqa: F401  (a fixture)

PAGE = ROOT / "docs/howto/migrate.md"
# A free port of this machine; its name may not be known to any name server.
TORCHRUN = "torchrun --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1"
IN_ORDER = [  # a random order would be another one on each side
    ("shuffle=True", "shuffle=False"),
    ("np.random.default_rng(epoch).permutation(len(data_y))", "np.arange(len(data_y))"),
    ("global_batch=64, drop_last=True)", 'global_batch=64, drop_last=True, shuffle="none")'),
]


def side(heading: str, sign: str) -> str:
    """The script before ("-") or after ("+") the change."""
    text = re.search(rf"^## {heading}\n.*?```diff\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert text
    script = "\n".join(line[1:] for line in text[1].splitlines() if line[:1] in (sign, " ", ""))
    for random, ordered in IN_ORDER:
        script = script.replace(random, ordered)
    return script


def losses(script: str, launcher: str, folder: Path) -> list[float]:
    (folder / "script.py").write_text(script)
    done = shell(f"timeout 100 {launcher} script.py", folder)
    assert done.returncode == 0, done.stdout
    return [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)]


@pytest.mark.longer
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("heading", "launcher"),
    [
        (
            "DistributedDataParallel",
            TORCHRUN,
        ),
        ("Hand-written mpi4py", "mpiexec -n 2 python"),
    ],
)
def test_both_sides_have_the_same_losses(heading: str, launcher: str, place: Path) -> None:  # noqa: F811
    before = losses(side(heading, "-"), launcher, place)
    after = losses(side(heading, "+"), "mpiexec -n 2 python", place)
    assert len(before) == 3 and before[0] > 1.2 * before[-1]
    assert after == pytest.approx(before, rel=1e-5)
