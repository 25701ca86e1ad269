"""Checkpoints in the background, on one rank: what training sees of them, and of their failures."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import names

import mpidp
from mpidp.errors import CheckpointError
from mpidp.train.checkpoint import write as module
from mpidp.train.checkpoint.read import load, newest
from mpidp.train.checkpoint.saver import Saver
from mpidp.train.checkpoint.write import as_checkpoint_error


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until the test sets this event."""
    event = threading.Event()
    write_part = module.write_part

    def held(path: Path, state: dict[str, Any]) -> Any:
        assert event.wait(30)
        return write_part(path, state)

    monkeypatch.setattr(module, "write_part", held)
    yield event
    event.set()


def make(folder: Path, **options: Any) -> Saver:
    return Saver(mpidp.init(), folder, 2, **options)


def save(saver: Saver, step: int, weight: torch.Tensor) -> None:
    saver.save(step, lambda: {"weight": weight, "step": step}, lambda: {"own": step})


def test_training_goes_on_while_files_are_written(tmp_path: Path, gate: threading.Event) -> None:
    """Behaviour 44: what is saved is the state at the call, whatever training makes of it meanwhile."""
    saver, weight = make(tmp_path), torch.zeros(4)
    save(saver, 1, weight)
    for _ in range(3):
        weight.add_(1)
        saver.poll()
    assert names(tmp_path) in ([], [name for name in names(tmp_path) if name.startswith(".partial-")])
    gate.set()
    saver.finish()
    saver.close()
    assert load(newest(tmp_path)[0])["weight"].tolist() == [0.0] * 4


def test_the_run_is_on_the_disk_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 41: after a power cut no checkpoint tells of records that are lost."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"to {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    metrics, gone, checkpoints = tmp_path / "metrics.jsonl", tmp_path / "gone", tmp_path / "checkpoints"
    metrics.write_text("{}\n")
    checkpoints.mkdir()
    saver = make(checkpoints, relies_on=[metrics, gone])
    save(saver, 1, torch.zeros(4))
    saver.finish()
    saver.close()
    before = events[: events.index(f"to {checkpoints / 'step_00000001'}")]
    assert str(metrics) in before and str(tmp_path) in before
    assert str(gone) not in events


def test_a_second_one_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    saver = make(tmp_path)
    save(saver, 1, torch.ones(2))
    threading.Timer(0.2, gate.set).start()
    save(saver, 2, torch.ones(2))
    assert newest(tmp_path)[0].name == "step_00000001"
    saver.finish()
    assert newest(tmp_path)[0].name == "step_00000002"
    assert saver.newest == tmp_path / "step_00000002"
    saver.close()


def test_a_failure_is_raised_at_a_later_step_and_the_one_before_stays(tmp_path: Path) -> None:
    """Behaviour 44."""
    saver = make(tmp_path)
    save(saver, 1, torch.ones(2))
    saver.finish()
    blocker = tmp_path / "step_00000002"
    blocker.touch()  # a file where the folder is to be
    blocker.rename(tmp_path / ".removed-step_00000002")
    (tmp_path / "step_00000002").symlink_to("nowhere")
    save(saver, 2, torch.ones(2))
    with pytest.raises(CheckpointError, match="step_00000002") as caught:
        saver.finish()
    assert any("step_00000001 stays the newest" in note for note in caught.value.__notes__)
    assert newest(tmp_path)[0].name == "step_00000001"
    saver.close()
    assert not list(tmp_path.glob(".partial-*")), "what was written is removed"


def test_a_failure_to_remove_an_old_one_does_not_take_back_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make(tmp_path)
    for step in (1, 2):
        save(saver, step, torch.ones(2))
        saver.finish()
    rmtree = shutil.rmtree

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save(saver, 3, torch.ones(2))
    with pytest.raises(CheckpointError, match="permission denied") as caught:
        saver.finish()
    assert any("step_00000003 is complete" in note for note in caught.value.__notes__)
    assert saver.newest == newest(tmp_path)[0] == tmp_path / "step_00000003"
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(saver, 4, torch.ones(2))
    saver.finish()
    saver.close()
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000004"]


@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_a_state_that_cannot_be_saved(tmp_path: Path, on_failure: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mpidp")
    saver = make(tmp_path, on_failure=on_failure)
    for number, state in enumerate([lambda: {"odd": lambda: None}, lambda: {}["missing"]]):
        saver.save(number, state, dict)
        if on_failure == "stop":
            with pytest.raises(CheckpointError, match="cannot be written"):
                saver.finish()
        else:
            saver.finish()
            assert f"checkpoint of step {number}" in caplog.text
            assert saver.failure is not None
    save(saver, 3, torch.ones(1))
    saver.finish()
    assert saver.failure is None and newest(tmp_path)[0].name == "step_00000003"
    saver.close()


def test_the_folder_vanished(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saver = make(folder)
    save(saver, 1, torch.ones(1))
    saver.finish()
    folder.rename(tmp_path / "elsewhere")
    save(saver, 2, torch.ones(1))
    with pytest.raises(CheckpointError, match="the folder is gone"):
        saver.finish()
    assert not folder.exists()
    (tmp_path / "elsewhere").rename(folder)
    save(saver, 3, torch.ones(1))
    saver.finish()
    assert newest(folder)[0].name == "step_00000003"
    saver.close()


REASONS = {
    errno.EDQUOT: "the disk quota is used up (EDQUOT)",
    errno.EIO: "input/output error) (EIO)",
    errno.ESTALE: "stale file handle) (ESTALE)",
    errno.ENAMETOOLONG: "File name too long (ENAMETOOLONG)",
}


@pytest.mark.parametrize("number", REASONS, ids=errno.errorcode.get)
def test_reasons_that_no_test_machine_gives(tmp_path: Path, number: int) -> None:
    """Said by a file that refuses; tests/faults has real file systems for the others."""
    with pytest.raises(OSError) as caught:
        raise OSError(number, os.strerror(number), str(tmp_path / "state.pt"))
    error = as_checkpoint_error(caught.value, tmp_path)
    assert REASONS[number] in str(error) and str(tmp_path / "state.pt") in str(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; tests/faults mounts file systems instead")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    saver = make(tmp_path)
    tmp_path.chmod(0o500)
    save(saver, 2, torch.ones(1))
    with pytest.raises(CheckpointError, match="permission denied"):
        saver.finish()
    tmp_path.chmod(0o700)
    saver.close()


def test_an_error_of_training_completes_the_checkpoint_on_its_way(tmp_path: Path, gate: threading.Event) -> None:
    saver = make(tmp_path)
    save(saver, 1, torch.ones(1))
    gate.set()
    saver.leave(RuntimeError("training failed"))
    assert newest(tmp_path)[0].name == "step_00000001"
