"""Kill checkpoints while they are written, and damage them, many times at random.

Usage: python tests/faults/chaos_checkpoint.py [--points 300] [--flips 50] [--ranks 2] [--seed S]

* kill points: jobs under mpiexec resume from one folder and save in it until SIGKILL hits one of their ranks, at a
  random event of its saving or at a random moment. After each, the newest complete checkpoint must load, its parts
  belong together, and it must not be older than the last one that the job was told is complete.
* flips: a random bit flipped in a random file of a checkpoint, or the file cut off somewhere. Each must be found, its
  file named, and the checkpoint before it be taken.

Exit code 1 when anything of that failed. The same seed repeats the same choices.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_job import check

from jobs import ROOT, Result, finish, kill, launch, run_job
from mpidp.errors import CheckpointError
from mpidp.train.checkpoint import read as checkpoint
from mpidp.train.checkpoint.read import find_faults, read_manifest

JOB = Path(__file__).with_name("checkpoint_job.py")
NUM_BYTES = 400_000
SAVES = 6  # what an unharmed job does
MOST_EVENTS = (620, 270)  # of rank 0, and of any other, in such a job
TIMEOUT_S = 60.0


def kill_points(folder: Path, points: int, ranks: int, choose: random.Random) -> list[str]:
    """Kill so many jobs in one folder; what went wrong, a line each."""
    faults, hits, newest = [], 0, 0
    events: Counter[str] = Counter()
    for point in range(points):
        rank = choose.randrange(ranks)
        place = {"KILL_RANK": str(rank), "KILL_AT": str(choose.randrange(1, MOST_EVENTS[min(rank, 1)]))}
        by_time = choose.random() < 0.2
        delay_s = choose.uniform(0.0, 0.05)
        result = _killed_after(folder, ranks, delay_s) if by_time else _job(folder, ranks, place)
        told = [int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith(("complete", "resumed"))]
        hits += result.code != 0
        events.update(["a random moment"] if by_time else re.findall(r"killed at event \d+: (\S+)", result.stderr))
        fault = _look(folder, max([newest, *told]))
        what = f"{delay_s:.3f} s after the first message" if by_time else f"{place}"
        if fault or (result.code != 0 and "Traceback" in result.output):
            faults.append(f"point {point} ({what}): {fault or result.output}")
        newest = max([newest, *told])
    where = ", ".join(f"{count} at {event}" for event, count in events.most_common())
    print(f"{points} kill points: {hits} hit a job ({where}); newest step {newest}; {len(faults)} unusable", flush=True)
    return faults


def flips(folder: Path, number: int, choose: random.Random) -> list[str]:
    """Damage the newest checkpoint so many times; what was not found, a line each."""
    faults = []
    newest, before = checkpoint.newest_first(folder)[:2]
    for index in range(number):
        file = choose.choice(sorted(newest.iterdir()))
        content = file.read_bytes()
        place = choose.randrange(len(content))
        if choose.random() < 0.7:
            bit = choose.randrange(8)
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            file.write_bytes(damaged)
            what = f"bit {bit} of byte {place} of {file.name} flipped"
        else:
            os.truncate(file, place)
            what = f"{file.name} cut off at byte {place}"
        fault = _find(newest, file.name, folder, before)
        if fault:
            faults.append(f"flip {index} ({what}): {fault}")
        file.write_bytes(content)
    print(f"{number} flips and truncations, {number - len(faults)} found and named", flush=True)
    return faults


def _find(newest: Path, name: str, folder: Path, before: Path) -> str:
    """What is wrong with how the damage is dealt with, or nothing."""
    found = checkpoint.find_fault(newest) or ""
    if name not in found:
        return f"found {found!r}"
    try:
        named = list(find_faults(newest, read_manifest(newest)))
    except CheckpointError as error:
        named = [str(error)]
    if len(named) != 1 or name not in named[0]:
        return f"verify names {named}"
    path, _ = checkpoint.newest(folder)
    return "" if path == before else f"{path} was taken"


def _look(folder: Path, at_least: int) -> str:
    """What is wrong with the newest complete checkpoint, or nothing."""
    if at_least == 0 and not checkpoint.newest_first(folder):
        return ""
    try:
        path, _ = checkpoint.newest(folder)
        step = check(path, NUM_BYTES)
    except (AssertionError, CheckpointError) as error:
        return str(error)
    latest = folder / "latest"
    if latest.is_symlink() and not latest.exists():
        return "latest points to nothing"
    return "" if step >= at_least else f"{path.name} is the newest, though {at_least} was complete"


def _job(folder: Path, ranks: int, environment: dict[str, str]) -> Result:
    return run_job([JOB, folder, str(SAVES)], ranks, TIMEOUT_S, cwd=ROOT, environment=environment)


def _killed_after(folder: Path, ranks: int, delay_s: float) -> Result:
    """Kill the whole job a while after its first message: at once, as a node without power."""
    job = launch([JOB, folder, str(SAVES * 1000)], ranks, cwd=ROOT)
    assert job.stdout is not None
    first = job.stdout.readline()
    try:
        job.wait(delay_s)
    except Exception:
        kill(job)
    result = finish(job, TIMEOUT_S)
    return Result(result.code, first + result.stdout, result.stderr)


def main() -> int:
    """Do as the words say; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--flips", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    choose = random.Random(seed)
    print(f"chaos_checkpoint: seed {seed}, {options.ranks} ranks", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos_checkpoint_"))
    faults = kill_points(folder, options.points, options.ranks, choose)
    end = _job(folder, options.ranks, {})
    if end.code != 0:
        faults.append(f"the last job failed: {end.output}")
    else:
        odd = [path.name for path in folder.iterdir() if not path.name.startswith("step_") and path.name != "latest"]
        faults += [f"left behind: {name}" for name in odd]
        faults += flips(folder, options.flips, choose)
    print("\n".join([*faults, f"{len(faults)} faults; seed {seed}"]))
    if not faults:
        shutil.rmtree(folder)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
