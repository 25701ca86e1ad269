"""Tallies of losses over uneven batches, and the file that records go to."""

import errno
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidp
from mpidp.train.records.recorder import MetricsFile, Tally, memory_bytes
from mpidp.train.records.run_folder import RankLog

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> mpidp.World:
    return mpidp.init()


def scores(*answers: int, classes: int = 3) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(answers, dtype=torch.int64), classes).float()


def classes(*targets: int) -> torch.Tensor:
    return torch.tensor(targets, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        pytest.param([], {"samples": 0, "loss": math.nan}, id="nothing"),
        pytest.param(
            [(1.0, scores(0, 1, 2), classes(0, 1, 1)), (5.0, scores(0), classes(0))],
            {"samples": 4, "loss": 2.0, "accuracy": 0.75},
            id="means over samples, not over batches",
        ),
        pytest.param(
            [(math.nan, torch.empty(0, 3), classes()), (2.0, scores(1, 1), classes(1, 0))],
            {"samples": 2, "loss": 2.0, "accuracy": 0.5},
            id="a batch without samples is left out",
        ),
        pytest.param(
            [(math.nan, scores(0), classes(0)), (1.0, scores(0), classes(0))],
            {"samples": 2, "loss": math.nan, "accuracy": 1.0},
            id="a NaN of real samples is not hidden",
        ),
        pytest.param(
            [(0.5, torch.zeros(4, 1), torch.zeros(4, 1))], {"samples": 4, "loss": 0.5}, id="regression has no accuracy"
        ),
    ],
)
def test_a_tally(world: mpidp.World, batches: list[Any], expected: dict[str, float]) -> None:
    """Behaviours 16 and 26; taken, it starts anew."""
    tally = Tally(CPU)
    for loss, output, target in batches:
        tally.add(torch.tensor(loss), output, target, len(target))
    assert tally.total(world) == pytest.approx(expected, nan_ok=True)
    tally.add(torch.tensor(3.0), scores(0), classes(1), 1)
    assert tally.total(world) == {"samples": 1, "loss": 3.0, "accuracy": 0.0}


def test_a_loss_with_a_graph_is_not_kept_and_large_sums_do_not_overflow(world: mpidp.World) -> None:
    """Behaviour 28: memory stays flat."""
    tally = Tally(CPU)
    for _ in range(100):
        weight = torch.full((1,), 1000.0, requires_grad=True)
        tally.add((weight * 1).sum(), scores(0), classes(0), 1000)
    assert not tally._sums.requires_grad
    assert tally.total(world)["loss"] == 1000.0


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_reader_sees_whole_lines_of_json_at_once_even_when_training_diverges(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.num_bytes == 0
    file.write({"loss": float("nan"), "lr": float("inf"), "seconds": {"data": 0.5}})
    assert read(path) == [{"loss": None, "lr": None, "seconds": {"data": 0.5}}]
    assert file.num_bytes == path.stat().st_size
    file.close()


def test_what_a_dead_run_wrote_after_its_checkpoint_is_cut_off(tmp_path: Path) -> None:
    """Behaviour 43: no step is recorded twice."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1})
    at_checkpoint = file.num_bytes
    file.write({"step": 2})
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 3, "lo')
    file = MetricsFile(path, at_checkpoint)
    assert file.num_bytes == at_checkpoint
    file.write({"step": 2, "again": True})
    file.close()
    assert read(path) == [{"step": 1}, {"step": 2, "again": True}]


def test_a_file_shorter_than_at_the_checkpoint_is_not_filled_with_zeros(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, start_bytes=1000)
    file.write({"step": 9})
    file.close()
    assert read(path) == [{"step": 9}]


def test_memory_is_in_bytes() -> None:
    assert 10 * 2**20 < memory_bytes(CPU)["host"] < 2**40


class NearlyFull:
    """A file whose disk takes the first half of a line."""

    def __init__(self, file: Any):
        self.file = file
        self.calls = 0

    def write(self, data: bytes) -> int:
        self.calls += 1
        if self.calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(data[: len(data) // 2]))

    def fileno(self) -> int:
        return int(self.file.fileno())


def test_a_full_disk_leaves_whole_lines_and_is_named(tmp_path: Path) -> None:
    """Behaviour 54: half a line would spoil the next one."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1})
    whole = path.read_bytes()
    real = file._file
    file._file = NearlyFull(real)  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        file.write({"step": 2})
    assert path.read_bytes() == whole and file.num_bytes == len(whole)
    file._file = real
    file.write({"step": 3})
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_log_that_cannot_be_written_is_remembered_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = RankLog(tmp_path / "rank_0000.log")
    stream = handler.stream
    handler.setStream(open("/dev/full", "w"))  # noqa: SIM115
    stream.close()
    for _ in range(3):
        handler.emit(logging.LogRecord("mpidp", logging.INFO, "", 0, "a line", (), None))
    assert isinstance(handler.failure, OSError) and handler.failure.filename == str(tmp_path / "rank_0000.log")
    handler.failure = None
    handler.emit(logging.LogRecord("mpidp", logging.INFO, "", 0, "a line", (), None))
    assert handler.failure is None
    handler.close()
    assert capsys.readouterr() == ("", "")
