"""Kill trainings at random moments and resume them, many times.

Usage: python tests/faults/chaos_kill.py [--kills 100] [--ranks 3] [--seed S]

Each time a training of a tiny model is started in a fresh folder, and SIGKILL hits one random rank at a random moment,
from before the first step to the last. The job must end within 5 s, with an exit code that is not 0 and a message that
says that a process was killed. Resumed (or started anew where nothing was saved yet), it must end with the records of
an uninterrupted run, the same losses, no step twice and none left out, and with its parameters, bit for bit.

Exit code 1 when anything of that failed. The same seed repeats the same choices; moments differ as the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tiny import make_workplace

from jobs import finish, launch, run_job
from mpidp.train.checkpoint.read import load, newest

END_S = 5.0
TIMEOUT_S = 90.0
WORDS = ["-m", "mpidp", "train", "run.toml", "--checkpoint.every_steps=2"]
KINDS = ("train", "validation")
EXACT = ("kind", "step", "epoch", "samples", "loss", "accuracy", "lr")
CAUSES = re.compile(r"KILLED BY SIGNAL: 9|signal 9|SIGKILL")


@dataclass(frozen=True)
class Outcome:
    """One kill: seconds from it to the job's end (None: the job was done before), and what was wrong."""

    end_s: float | None
    fault: str


def records(run: Path) -> list[list[Any]]:
    """What a run wrote of its steps, without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [[record.get(key) for key in EXACT] for record in map(json.loads, lines)]


def difference(run: Path, whole: Path, kinds: Sequence[str] = KINDS) -> str:
    """How a run differs from one that nobody interrupted, in words; nothing if they are equal bit for bit."""
    found, expected = ([record for record in records(place) if record[0] in kinds] for place in (run, whole))
    for ours, theirs in zip_longest(found, expected):
        if ours != theirs:
            return f"records differ: {ours} instead of {theirs}"
    ours, theirs = (load(newest(folder / "checkpoints")[0])["model"] for folder in (run, whole))
    different = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
    return f"parameters differ by up to {different}" if any(different.values()) else ""


def ranks_of(folder: Path) -> list[int]:
    """The processes of the job in `folder` that train, whatever started them, without what they start themselves."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            here = Path(os.readlink(process / "cwd")) == folder
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is not ours
        if here and b"mpidp" in words and Path(os.fsdecode(words[0])).name.startswith("python"):
            found[int(process.name)] = parent
    return sorted(process for process, parent in found.items() if parent not in found)


def kill_once(folder: Path, ranks: int, delay_s: float, choose: random.Random, whole: Path) -> Outcome:
    """Start, kill one rank after a while, watch the end, resume, compare."""
    make_workplace(folder)
    job = launch(WORDS, ranks, cwd=folder)
    start = time.monotonic()
    time.sleep(delay_s)
    running = ranks_of(folder)
    if job.poll() is not None or not running:
        result = finish(job, TIMEOUT_S)
        return Outcome(None, "" if result.code == 0 else f"not killed, yet: {result.output}")
    os.kill(choose.choice(running), signal.SIGKILL)
    killed = time.monotonic()
    result = finish(job, TIMEOUT_S)
    end_s = time.monotonic() - killed
    if result.code == 0 and not difference(folder / "runs" / "run", whole):
        return Outcome(None, "")  # it hit a process on its way out, whose work was done
    fault = _look_at_end(result.code, result.output, end_s, killed - start)
    return Outcome(end_s, fault or resume(WORDS, folder, ranks, whole, TIMEOUT_S))


def _look_at_end(code: int, output: str, end_s: float, delay_s: float) -> str:
    if code == 0:
        return f"exit code 0 after a kill {delay_s:.2f} s after the start: {output}"
    if end_s > END_S:
        return f"ended {end_s:.1f} s after the kill"
    return "" if CAUSES.search(output) else f"no word of the kill: {output}"


def resume(
    words: Sequence[str], folder: Path, ranks: int, whole: Path, timeout_s: float, kinds: Sequence[str] = KINDS
) -> str:
    """Resume a job, or start it anew where nothing had been saved; how it differs from `whole`, or nothing."""
    result = run_job([*words, "--resume=auto"], ranks, timeout_s, cwd=folder)
    if result.code != 0:
        return f"resume ended with {result.code}: {result.output}"
    runs = sorted((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime)
    return difference(runs[-1], whole, kinds)


def main() -> int:
    """Do as the words say; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    choose = random.Random(seed)
    print(f"chaos_kill: seed {seed}, {options.ranks} ranks", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos_kill_"))
    whole = folder / "whole"
    whole.mkdir()
    make_workplace(whole)
    start = time.monotonic()
    result = run_job(WORDS, options.ranks, TIMEOUT_S, cwd=whole)
    duration_s = time.monotonic() - start
    if result.code != 0:
        print(result.output)
        return 1
    outcomes: list[Outcome] = []
    hits = 0
    while hits < options.kills:
        place = folder / f"{len(outcomes):04}"
        place.mkdir()
        delay_s = choose.uniform(0.3, 1.0) * duration_s
        outcome = kill_once(place, options.ranks, delay_s, choose, whole / "runs" / "run")
        outcomes.append(outcome)
        hits += outcome.end_s is not None
        if outcome.fault:
            print(f"start {len(outcomes)}, {place}: {outcome.fault}", flush=True)
        else:
            shutil.rmtree(place)
    ends = sorted(outcome.end_s for outcome in outcomes if outcome.end_s is not None)
    faults = sum(bool(outcome.fault) for outcome in outcomes)
    print(
        f"{hits} kills in {len(outcomes)} starts, ended {median(ends):.2f} s (median) and {ends[-1]:.2f} s (longest) "
        f"after the kill; {faults} faults; seed {seed}"
    )
    if not faults:
        shutil.rmtree(folder)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
