"""One rank of `mpidp train` that fails, hangs or diverges: what the user sees, and with which exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tiny import make_workplace

from jobs import Result, run_job

HOST = socket.gethostname()
MORE = '''

import signal

import mpidp

AT = int(os.environ.get("AT", "-1"))
calls = 0


def transform(fields):
    """Does on rank 1, with its batch number AT, what WHAT says."""
    global calls
    calls += 1
    if RANK == "1" and calls == AT:
        exec(os.environ["WHAT"])
    return fields


class FlipsBit(torch.optim.SGD):
    """Flips a bit of a weight on rank 1 in its step AT."""

    steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if RANK == "1" and self.steps == AT:
            weight = self.param_groups[0]["params"][0].detach()
            weight.view(-1).view(torch.int32)[3] ^= 1 << 23


class Full(Net):
    """Runs out of memory on rank 1, on its way forward or backward, in its step AT."""

    def forward(self, x):
        output = super().forward(x)
        if RANK == "1" and self.step == AT and self.training:
            if os.environ["WHAT"] == "forward":
                self.allocate()
            output.register_hook(self.allocate)
        return output

    def allocate(self, gradient=None):
        torch.empty(1 << 60, dtype=torch.uint8)


class Fails(torch.optim.SGD):
    """Raises on rank 1 in its step AT."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if RANK == "1" and self.steps == AT:
            raise RuntimeError("out of luck")
        super().step(closure)
'''


def train(folder: Path, *words: str, ranks: int = 3, **environment: str) -> Result:
    make_workplace(folder)
    with (folder / "own.py").open("a") as file:
        file.write(MORE)
    environment |= {"PYTHONPATH": str(folder)}
    return run_job(
        ["-m", "mpidp", "train", "run.toml", *words], ranks, timeout_s=60, cwd=folder, environment=environment
    )


@pytest.mark.library
def test_an_error_of_one_ranks_data_is_an_error_of_all(tmp_path: Path) -> None:
    """Behaviour 30: said once, with rank and step, without MPI's words about an abort; the state before is saved."""
    words = ("--data.transform=own:transform", "--checkpoint.every_steps=2")
    result = train(tmp_path, *words, AT="6", WHAT="raise mpidp.errors.DataError('sample 17 is no picture')")
    assert result.code == 1
    assert result.output.count("sample 17 is no picture") == 1
    assert f"on rank 1 of 3 ({HOST}), after step 5" in result.output
    assert "bort" not in result.output
    assert (tmp_path / "runs" / "run" / "checkpoints").is_dir()


@pytest.mark.library
def test_a_rank_that_hangs_in_its_data(tmp_path: Path) -> None:
    """Behaviour 32: rank, step, phase and stack in rank 0's log and on the console; the job ends."""
    words = ("--data.transform=own:transform", "--watch.stall_warning_s=1", "--watch.stall_abort_s=4")
    result = train(tmp_path, *words, AT="6", WHAT="time.sleep(600)")
    assert result.code == 1
    log = next((tmp_path / "runs" / "run").rglob("*0.log")).read_text()
    for text in (result.output, log):
        assert f"rank 1 ({HOST}) does not arrive" in text
        assert f"rank 1 on {HOST}: step 5, phase data" in text
        assert "own.py" in text and "in transform" in text
        assert "ranks 0, 2 wait in" in text


@pytest.mark.library
def test_an_uncaught_error_says_step_and_phase(tmp_path: Path) -> None:
    """Behaviour 30: one rank's own, after a step: nobody else can know of it, so it ends the job."""
    result = train(tmp_path, "--optimizer.name=own:Fails", AT="5")
    assert result.code == 1
    assert f"[rank 1 of 3 on {HOST}] at step 4, in phase optimizer: Traceback" in result.output
    assert result.output.count("RuntimeError: out of luck") == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_stops_training(tmp_path: Path, ranks: int) -> None:
    """Behaviour 35."""
    words = ("--optimizer.name=own:FlipsBit", "--watch.compare_steps=4")
    result = train(tmp_path, *words, ranks=ranks, AT="5")
    assert result.code == 1
    who = "ranks 0 ({0}), 1 ({0}) hold" if ranks == 2 else "rank 1 ({0}) holds"
    assert who.format(HOST) in result.output
    assert "first in parameter first.weight" in result.output
    assert result.output.count("look for faulty memory there") == 1


@pytest.mark.library
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_without_memory_is_named(tmp_path: Path, phase: str) -> None:
    """Behaviour 30: rank, node, step, phase, and what to do; on its way forward all ranks hear it and end together."""
    result = train(tmp_path, "--model.name=own:Full", AT="5", WHAT=phase)
    assert result.code == 1
    assert result.output.count("fewer samples at once (train.micro_batch") == 1
    assert "DefaultCPUAllocator: can't allocate memory" in result.output
    if phase == "forward":
        assert f"rank 1 of 3 ({HOST}) ran out of memory in step 5, phase forward, with " in result.output
        assert "Traceback" not in result.output
    else:
        assert f"[rank 1 of 3 on {HOST}] at step 4, in phase backward: Traceback" in result.output


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_rank_without_memory_in_a_micro_batch(tmp_path: Path, overlap: str) -> None:
    """Behaviour 30: in the second slice of four, none of which the other ranks have reduced."""
    words = ("--model.name=own:Full", "--train.micro_batch=3", f"--reduce.overlap={overlap}")
    result = train(tmp_path, *words, AT="2", WHAT="forward")
    assert result.code == 1 and "Traceback" not in result.output, result.output
    assert result.output.count(f"rank 1 of 3 ({HOST}) ran out of memory in step 1, phase forward") == 1
