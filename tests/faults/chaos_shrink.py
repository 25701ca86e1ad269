"""Kill random ranks in jobs that go on without them, many times.

Usage: MPIEXEC unset, in an environment with Open MPI 5:
    python tests/faults/chaos_shrink.py --kills 100 [--seed 1] [--sharded]

Half of the kills come at random moments from outside, half at a random point of a random step, from inside: up to
three in a job of four ranks. Exits with 1 when a job did not end well, trained on a row not once, or gave another loss.
With --sharded the optimizer's state is in shards, each on two ranks; a job may end where both died, and must say so.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from shrink_job import POINTS, RECOVERY_POINTS, SHARDED_POINTS, STEPS_AN_EPOCH, Trained, make_place, train, trained_once

RANKS, EPOCHS, START_S = 4, 40, 100.0
TRAINING_S = 8.0  # about as long as the 240 steps take
RECOVERY = (*RECOVERY_POINTS, "deal", "dealt")
BOTH_DIED = "was held by lost ranks only"
WORDS = (
    "--train.epochs",
    str(EPOCHS),
    "--checkpoint.every-epochs",
    "2",
    "--run.name",
    "chaos",
    "--optimizer.lr",
    "0.001",
)
SHARDED = ("--optimizer.sharded", "true")
WIDTH = ("--model.arguments.width", "20000")  # 1 MB of gradients: messages that need the sender until they are there


@dataclass
class Plan:
    """What is done to a job: victims with moments (seconds after the first step), victims with points and steps."""

    moments: dict[int, float] = field(default_factory=dict)
    points: list[str] = field(default_factory=list)


def make_plan(choose: random.Random, kills: int, points: tuple[str, ...]) -> Plan:
    """Choose victims, at most three."""
    plan = Plan()
    step = 0
    for rank in choose.sample(range(RANKS), kills):
        if choose.random() < 0.5:
            plan.moments[rank] = choose.uniform(0, TRAINING_S)
            continue
        point = choose.choice(points)
        if point in RECOVERY and not plan.points:
            point = "reduce"  # there is nothing to recover from yet
        # A recovery belongs to the loss before it, at the same step; evaluations and checkpoints come after epochs.
        step = step if point in RECOVERY else choose.randrange(1, STEPS_AN_EPOCH * EPOCHS)
        if point in ("evaluate", "checkpoint"):
            step = max(1, step // (2 * STEPS_AN_EPOCH)) * 2 * STEPS_AN_EPOCH
        plan.points.append(f"{rank}:{point}:{step}{':2' if point == 'gather' else ''}")
    return plan


def kill_at(place: Path, plan: Plan) -> None:
    """Kill ranks from outside, once the first step has been tried."""
    start = time.monotonic()
    while not list(place.glob("notes_*")):
        if time.monotonic() - start > START_S:
            return  # the job has failed, or will be killed, and that is seen
        time.sleep(0.01)
    first = time.monotonic()
    for rank, moment in sorted(plan.moments.items(), key=lambda pair: pair[1]):
        time.sleep(max(0.0, first + moment - time.monotonic()))
        try:
            os.kill(int((place / f"pid_{rank}").read_text()), signal.SIGKILL)
        except ProcessLookupError:
            print(f"  rank {rank} had ended already", flush=True)


def faults(trained: Trained, untroubled: Trained) -> list[str]:
    """What is wrong with a job, in words."""
    if trained.result.code == 1 and trained.result.output.count(BOTH_DIED) == 1:
        return []
    found = []
    if trained.result.code != 0:
        found.append(f"exit code {trained.result.code}\n{trained.result.output[-4000:]}")
    if not trained_once(trained, EPOCHS):
        found.append("rows were lost or repeated")
    for step, loss in trained.losses.items():
        if loss is None or not math.isclose(loss, untroubled.losses[step], rel_tol=1e-3, abs_tol=1e-4):
            found.append(f"loss {loss} at step {step} instead of {untroubled.losses[step]}")
            break
    if len(trained.validations) != EPOCHS:
        found.append(f"{len(trained.validations)} evaluations instead of {EPOCHS}")
    return found


def main() -> int:
    """Run jobs until so many ranks have died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--sharded", action="store_true")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    choose = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="mpidp_chaos_"))
    place = make_place(folder)
    words = (*WORDS, *WIDTH, *(SHARDED if options.sharded else ()))
    points = POINTS + RECOVERY_POINTS + (SHARDED_POINTS if options.sharded else ())
    untroubled = train(place, 2, "", (*WORDS, *WIDTH))
    assert not faults(untroubled, untroubled), faults(untroubled, untroubled)
    killed, jobs, wrong, ended, lost_s = 0, 0, 0, 0, [0.0]
    while killed < options.kills:
        plan = make_plan(choose, min(choose.randint(1, RANKS - 1), options.kills - killed), points)
        trained = train(place, RANKS, " ".join(plan.points), words, killer=lambda plan=plan: kill_at(place, plan))
        found = faults(trained, untroubled)
        died = sum(len(ranks) for ranks in trained.lost)
        killed, jobs, wrong = killed + max(died, 1), jobs + 1, wrong + bool(found)
        ended += BOTH_DIED in trained.result.output
        lost_s += [of_loss["lost_s"] for of_loss in trained.of_losses]
        print(
            f"job {jobs}: {plan}: lost {trained.lost}{''.join(f'{chr(10)}  WRONG: {text}' for text in found)}",
            flush=True,
        )
    shutil.rmtree(folder)
    print(
        f"{killed} kills in {jobs} jobs of {RANKS} ranks, seed {options.seed}: {jobs - wrong - ended} went on with "
        f"every row trained on once and the losses of a run without kills, {ended} ended as both holders of a shard "
        f"had died, {wrong} did neither; longest recovery {max(lost_s):.3f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
