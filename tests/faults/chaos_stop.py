"""Stop random ranks for good, for a while, or ask them to stop, many times.

Usage: python tests/faults/chaos_stop.py [--stops 20] [--slows 50] [--preemptions 50] [--ranks 3] [--seed S]

A rank that is stopped for good (SIGSTOP) cannot say anything, nor be told anything. The job must end by the watchdog,
with exit code 1 and the rank named as one that is stopped. Ranks that are stopped and continued (SIGCONT), several
times in a job, only make it slow: it must end well. SIGTERM or SIGUSR2, to one rank or to all, must end it with 75 and
a word of why. All come at random moments, and all jobs, resumed where they ended early, must end with the records and
the parameters of a job that nobody disturbed, bit for bit.

Exit code 1 when anything of that failed. The same seed repeats the same choices; moments differ as the machine does.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chaos_kill import difference, ranks_of, resume
from tiny import make_workplace

from jobs import finish, kill, launch, run_job

STOPPED_EARLY = 75
TIMEOUT_S = 180.0
WARNING_S, ABORT_S = 2.0, 8.0
EPOCHS = 80
WORDS = [
    *("-m", "mpidp", "train", "run.toml", f"--train.epochs={EPOCHS}", "--checkpoint.every_epochs=4"),
    *(f"--watch.stall_warning_s={WARNING_S}", f"--watch.stall_abort_s={ABORT_S}"),
]
MOST_RECORDS = 200  # of 240: when something is done to a job at the latest
BEGIN_S = 60.0  # until there are records
BETWEEN_S = 0.02  # longer than a record takes
PAUSE_S = 0.8  # the longest; well under ABORT_S


def rank_of(pid: int) -> int:
    """The number that the launcher gave to a process."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = dict(word.split(b"=", 1) for word in words if b"=" in word)
    return int(found.get(b"PMI_RANK", found.get(b"OMPI_COMM_WORLD_RANK", b"-1")))


def begun(folder: Path, job: subprocess.Popen[str], records: int = 1) -> list[int]:
    """The ranks of a job, when it has written so many records: a machine's speed decides nothing."""
    end = time.monotonic() + BEGIN_S
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    ranks: list[int] = []
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= records):
        if job.poll() is not None or time.monotonic() > end:
            kill(job)
            raise AssertionError(f"the job never came to record {records}: {finish(job, TIMEOUT_S).output}")
        ranks = ranks or (ranks_of(folder) if metrics.exists() else [])  # takes longer than a record
        time.sleep(0.002)
    return ranks or ranks_of(folder)


def stop_once(folder: Path, ranks: int, choose: random.Random, whole: Path) -> str:
    """Stop one rank for good, and resume the job that ends by it; what was wrong, or nothing."""
    job = launch(WORDS, ranks, cwd=folder)
    victim = choose.choice(begun(folder, job, choose.randint(1, MOST_RECORDS)))
    rank = rank_of(victim)
    time.sleep(choose.uniform(0, BETWEEN_S))
    if job.poll() is not None:
        return "the job was over already"
    os.kill(victim, signal.SIGSTOP)
    result = finish(job, TIMEOUT_S)
    if result.code != 1:
        return f"exit code {result.code} with rank {rank} stopped: {result.output}"
    told = " ".join(result.output.split())  # a terminal breaks long lines
    if "its process is stopped (SIGSTOP" not in told or f"rank {rank} " not in told:
        return f"rank {rank} was stopped, and is not named: {result.output}"
    return resume(WORDS, folder, ranks, whole, TIMEOUT_S)


def slow_once(folder: Path, ranks: int, pauses: int, choose: random.Random, whole: Path) -> str:
    """Stop ranks for a while, again and again; what was wrong, or nothing."""
    job = launch(WORDS, ranks, cwd=folder)
    running = begun(folder, job)
    for _ in range(pauses):
        victim = choose.choice(running)
        try:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(choose.uniform(0.01, PAUSE_S))
            os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            break  # the job is over
        time.sleep(choose.uniform(0, PAUSE_S / 4))
    result = finish(job, TIMEOUT_S)
    if result.code != 0:
        return f"exit code {result.code} after {pauses} pauses: {result.output}"
    return difference(folder / "runs" / "run", whole)


def preempt_once(folder: Path, ranks: int, choose: random.Random, whole: Path) -> str:
    """Ask one rank or all to stop, and resume; what was wrong, or nothing."""
    job = launch(WORDS, ranks, cwd=folder)
    running = begun(folder, job, choose.randint(1, MOST_RECORDS))
    asked = running if choose.random() < 0.5 else [choose.choice(running)]
    name = choose.choice(("SIGTERM", "SIGUSR2"))
    time.sleep(choose.uniform(0, BETWEEN_S))
    for process in asked:
        try:
            os.kill(process, getattr(signal, name))
        except ProcessLookupError:
            break  # the job is over
    result = finish(job, TIMEOUT_S)
    if result.code == 0:  # it came in the last steps
        return difference(folder / "runs" / "run", whole)
    if result.code != STOPPED_EARLY or f"stopped by {name} after step" not in " ".join(result.output.split()):
        return f"exit code {result.code} after {name} to {len(asked)} ranks: {result.output}"
    # The save between two records of steps makes three of them.
    return resume(WORDS, folder, ranks, whole, TIMEOUT_S, kinds=("validation",))


def main() -> int:
    """Do as the words say; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--slows", type=int, default=50)
    parser.add_argument("--preemptions", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    choose = random.Random(options.seed)
    print(f"chaos_stop: seed {options.seed}, {options.ranks} ranks", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos_stop_"))
    undisturbed = run_job(WORDS, options.ranks, TIMEOUT_S, cwd=_place(folder, "whole"))
    assert undisturbed.code == 0, undisturbed.output
    whole = folder / "whole" / "runs" / "run"
    faults = []
    for number in range(options.stops):
        faults.append(stop_once(_place(folder, f"stop_{number}"), options.ranks, choose, whole))
        _tell(f"stop {number + 1}", faults[-1])
    left, jobs = options.slows, 0
    while left:
        pauses = min(left, choose.randint(2, 8))
        left, jobs = left - pauses, jobs + 1
        faults.append(slow_once(_place(folder, f"slow_{jobs}"), options.ranks, pauses, choose, whole))
        _tell(f"slow job {jobs}", faults[-1])
    for number in range(options.preemptions):
        faults.append(preempt_once(_place(folder, f"preemption_{number}"), options.ranks, choose, whole))
        _tell(f"preemption {number + 1}", faults[-1])
    wrong = sum(bool(fault) for fault in faults)
    print(
        f"{options.stops} ranks stopped for good, {options.slows} pauses in {jobs} jobs, {options.preemptions} "
        f"preemptions: {wrong} faults"
    )
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _place(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return make_workplace(folder / name)


def _tell(name: str, fault: str) -> None:
    print(f"{name}: {fault or 'as it should be'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
