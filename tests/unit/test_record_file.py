"""Records of a run: never half-written, and named where they are damaged all the same."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from small_runs import losses, small_run

from mpidp.errors import RecordError
from mpidp.train.records import starts
from mpidp.world.record_file import read_json, write_json


def test_a_crash_leaves_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 54: what is written becomes visible after it is on the disk."""
    path = tmp_path / "record.json"
    write_json(path, {"number": 1})
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        events.append("flush")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        events.append("replace")
        assert read_json(path, dict) == {"number": 1}
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", replaced)
    write_json(path, {"number": 2})
    assert read_json(path, dict) == {"number": 2}
    assert events == ["flush", "replace", "flush"]


def test_a_refusal_leaves_the_old_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_json(path, [1])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"record\.json"):
        write_json(path, [2])
    assert read_json(path, list) == [1]
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "\x00" * 50, "[" * 100_000])
def test_damage_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"record\.json is damaged"):
        read_json(path, dict)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match=r"record\.json is damaged"):
        read_json(path, list)


@pytest.mark.parametrize("name", ["env.json", "config.toml"])
@pytest.mark.parametrize("text", ["", "[{", '{"ranks": 1}', "[]", None])
def test_a_damaged_record_stops_no_resume(tmp_path: Path, name: str, text: str | None) -> None:
    """Behaviour 54: a run goes on, and ends as it would have."""
    whole = small_run(tmp_path, run__name="whole")
    run = Path(shutil.copytree(whole, tmp_path / "runs/run", symlinks=True))
    shutil.rmtree(run / "checkpoints/step_00000010")
    if text is None:
        (run / name).unlink()
    else:
        (run / name).write_text(text)
    small_run(tmp_path, run)
    assert losses(run) == losses(whole)
    assert starts.read(run)[-1]["end"] == "done"
    assert (run / "env.json.damaged").exists() == (name == "env.json" and text is not None)


def test_metrics_that_lost_their_end_are_gone_on_with(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    shutil.rmtree(run / "checkpoints/step_00000010")
    os.truncate(run / "metrics.jsonl", 50)  # in the middle of the first line, before the checkpoint's place
    small_run(tmp_path, run)
    assert [step for _, step, _ in losses(run)] == [6, 8, 10, 10]
