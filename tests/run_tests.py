"""Run the tests in rings: quick, then what a stranger runs, then the rest; or single folders of tests.

Usage: python tests/run_tests.py [--ring test] [--venv .venv] [--mpi mpich] [pytest words]
       python tests/run_tests.py --only mpi,unit,... [--sizes 1,2,3,4] [--venv .venv] [--mpi mpich] [pytest words]

`quick` and `test` are `make quick` and `make test`. The others are for .ci/run: `rest` is what `test` leaves out, and
`library` is what depends on the MPI library, to be run with another one. The tests of the folder mpi run under mpiexec
on several numbers of ranks, those of unit, faults, docs and examples without launcher.

Under mpiexec rank 0 prints; the others write logs, which are shown when the run fails. A test counts as passed when
it passed on every rank. A run that crashes, hangs or collects nothing counts as one failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent
ORDER = ("skipped", "passed", "failed")  # the outcome of a test over ranks is the one furthest to the right
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
OPEN_MPI = {  # as root, and with more ranks than cores, which then give way to each other
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
TERMINATE_S, PATIENCE_S = 10, 300
WORKERS = {"unit": 4}  # of pytest-xdist, at most one a core; the other folders start jobs of several ranks
# Each ring: folder of tests, ranks under mpiexec or None, which of its tests by marker.
RINGS: dict[str, list[tuple[str, int | None, str]]] = {
    "quick": [("unit", None, "not job")],
    "test": [
        ("unit", None, ""),
        ("mpi", 3, ""),
        *(("mpi", ranks, "sizes") for ranks in (1, 2, 4)),
        ("faults", None, "short"),
        ("docs", None, "not longer"),
    ],
    "rest": [
        ("docs", None, "longer"),
        ("examples", None, ""),
        *(("mpi", ranks, "not sizes") for ranks in (1, 2, 4)),
        ("faults", None, "not short"),
    ],
    "library": [("mpi", 3, ""), *(("mpi", ranks, "sizes") for ranks in (1, 2)), ("faults", None, "library")],
}


def run_rank(folder: Path, words: list[str]) -> None:
    """Become pytest on this rank, with its output in a log unless it is rank 0; never returns."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    if rank != "0":
        log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
    files = ["--color=no", f"--junitxml={folder / f'rank_{rank}.xml'}", f"--basetemp={folder / f'rank_{rank}_tmp'}"]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *files, *words])


def execute(command: list[str], environment: dict[str, str], timeout_s: float) -> str:
    """Run a command in a process group of its own; what went wrong, or nothing."""
    process = subprocess.Popen(command, env=environment, cwd=TESTS.parent, start_new_session=True)
    try:
        code = process.wait(timeout_s)
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"killed: it did not end within {timeout_s:g} s"
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the process group: politely, then not."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(TERMINATE_S)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left, as usual
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcomes(folder: Path, ranks: int) -> Counter[str]:
    """How many tests passed, failed and were skipped, from the JUnit files of all ranks."""
    worst: dict[tuple[str, str], str] = {}
    for rank in range(ranks):
        path = folder / f"rank_{rank}.xml"
        if not path.exists():
            worst["", "a rank left no results"] = "failed"
            continue
        for case in ElementTree.parse(path).iter("testcase"):
            tags = {child.tag for child in case}
            outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
            key = case.get("classname", ""), case.get("name", "")
            worst[key] = max(worst.get(key, "skipped"), outcome, key=ORDER.index)
    return Counter(worst.values())


def show_logs(folder: Path) -> None:
    """Print what the ranks other than 0 wrote."""
    for log in sorted(folder.glob("rank_*.log")):
        print(f"\n-- {log.name}\n{log.read_text(errors='replace')}", flush=True)


def run(kind: str, ranks: int | None, marked: str, options: argparse.Namespace) -> Counter[str]:
    """Run tests/KIND with these markers here, under mpiexec if `ranks` is a number, and print one line."""
    launch = "" if ranks is None else f" on {ranks} rank{'s' * (ranks > 1)}"
    name = f"tests/{kind}{launch}{f' ({marked})' * bool(marked)}, {options.mpi}"
    print(f"\n== {name}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="mpidp_tests_"))
    binaries = Path(os.path.abspath(options.venv)) / "bin"
    launcher = [] if ranks is None else [str(binaries / "mpiexec"), "-n", str(ranks)]
    program = [str(binaries / "python"), str(TESTS / "run_tests.py"), "--as-rank", str(folder)]
    # Alone, pytest-timeout ends what hangs: tests that start several jobs may take longer than a hang on ranks may.
    patience = [] if ranks else ["-o", f"faulthandler_timeout={PATIENCE_S}"]
    count = min(WORKERS.get(kind, 1), os.cpu_count() or 1)
    workers = ["-n", str(count), "--dist", "loadfile"] if count > 1 else []
    marks = ["-m", marked] if marked else []
    words = [str(TESTS / kind), *patience, *workers, *marks, *options.words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (OPEN_MPI if options.mpi == "openmpi" else {})
    start = time.monotonic()
    wrong = execute([*launcher, *program, *words], environment, options.timeout_s)
    counts = outcomes(folder, ranks or 1)
    if wrong:
        counts["failed"] = counts["failed"] or 1
    if counts["failed"]:
        show_logs(folder)
    shutil.rmtree(folder)
    print(f"== {name}: {line(counts)} in {time.monotonic() - start:.0f} s {wrong}".rstrip(), flush=True)
    return counts


def line(counts: Counter[str]) -> str:
    """The counts in words."""
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def _chosen(options: argparse.Namespace) -> list[tuple[str, int | None, str]]:
    if not options.only:
        return RINGS[options.ring]
    sizes = [int(size) for size in options.sizes.split(",")]
    return [(kind, ranks, "") for kind in options.only.split(",") for ranks in (sizes if kind == "mpi" else [None])]


def main() -> int:
    """Run what the command line asks for; 1 when anything failed, crashed or hung."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--venv", default=".venv", help="environment with the package and mpiexec")
    parser.add_argument("--mpi", choices=("mpich", "openmpi"), default="mpich", help="the MPI in that environment")
    parser.add_argument("--ring", choices=RINGS, default="test", help="which of the rings")
    parser.add_argument("--only", default="", help="these folders instead of a ring: unit,mpi,faults,docs,examples")
    parser.add_argument("--sizes", default="1,2,3,4", help="with --only: numbers of ranks for tests/mpi")
    parser.add_argument("--timeout-s", type=float, default=2400, help="seconds that one run may take")
    options, words = parser.parse_known_args()
    options.words = words
    total = Counter[str]()
    for kind, ranks, marked in _chosen(options):
        total += run(kind, ranks, marked, options)
    print(f"\n{line(total)}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_rank(Path(sys.argv[2]), sys.argv[3:])
    sys.exit(main())
