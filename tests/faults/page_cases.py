"""Programs that show the cases of docs/reference/failures.md.

Each is a training whose rank FAILS does what the case says, in a step or between two.
"""

from __future__ import annotations

LOOP = """
import os, signal, sys, threading, time
import torch
import mpidp

FAILS = {rank}

def load():
    time.sleep(600)

def spin():
    while True:
        pass

world = mpidp.init(stall_warning_s={warning}, stall_abort_s={abort})
model = mpidp.DataParallel(torch.nn.Linear(4, 2), world, compare_steps=4, {options})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def batches():
    for number in range(40):
        if number == 3 and world.rank == FAILS:
            {data}
        yield torch.ones(8, 4)

for x in model.batches(batches()):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if world.status.step == 5 and world.rank == FAILS:
        {step}
world.barrier()
"""

FLIP = "model.module.weight.detach().view(torch.int32)[1, 2] ^= 1 << 23"
NAN = "model.module.weight.detach()[0, 0] = float('nan')"
# What is different in each case, and the exit code; None where the launchers differ.
CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "exception": ({"step": "1 / 0"}, 1),
    "thread": ({"step": "threading.Thread(target=lambda: open('gone.h5'), name='reader').start()"}, 1),
    "memory": ({"step": "raise MemoryError('cannot allocate 8 GiB')"}, 1),
    "data": ({"data": "raise OSError(5, 'Input/output error', 'train.h5')"}, 1),
    "leaves": ({"step": "sys.exit(7)"}, 1),
    "sigterm": ({"step": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"}, 143),
    "interrupt": ({"step": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"}, 130),
    "sigkill": ({"step": "os.kill(os.getpid(), signal.SIGKILL)"}, None),
    "hangs": ({"data": "load()"}, 1),
    "stopped": ({"step": "os.kill(os.getpid(), signal.SIGSTOP)"}, 1),
    "deadlock": ({"step": "world.broadcast(1)"}, 1),
    "options": ({"options": "bucket_bytes=1000 + world.rank"}, 1),
    "nan": ({"options": "check_finite=True", "step": NAN}, 1),
    "passes": ({"step": "model(x).square().mean().backward()"}, 1),
    "rates": ({"step": "optimizer.param_groups[0]['lr'] = 0.05"}, 1),
    "diverged": ({"step": FLIP}, 1),
}
DEFAULTS = {"data": "pass", "step": "pass", "options": "", "warning": "1.0", "abort": "4.0"}


def program(case: str, rank: int = 1, **changes: str) -> str:
    """The program of a case, in which `rank` is the one that fails; `changes` are laid over what the case says."""
    return LOOP.format(rank=rank, **{**DEFAULTS, **CASES[case][0], **changes})
