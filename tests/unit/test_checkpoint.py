"""Checkpoints on disk: complete or not there, damage found and named, the newest usable one taken."""

import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import check_state, names, save, state_of

from mpidp.errors import CheckpointError
from mpidp.train.checkpoint.read import File, find_fault, find_faults, load, newest, read_manifest
from mpidp.world.system import Process

Damage = Callable[[Path], None]


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        (value,) = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 1 << bit]))


@pytest.mark.job
def test_round_trip_with_a_manifest_that_sha256sum_can_check(tmp_path: Path) -> None:
    path = save(tmp_path, 7, state_of(7), keep=3)
    assert path == tmp_path / "step_00000007"
    assert names(path) == ["manifest.json", "rank_00000.pt", "rank_00001.pt", "state.pt"]
    assert newest(tmp_path) == (path, [])
    check_state(path, 7)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["ranks"], manifest["algorithm"]) == (7, 2, "sha256")
    lines = "".join(f"{file['digest']}  {file['name']}\n" for file in manifest["files"])
    subprocess.run(["sha256sum", "--check", "--strict"], input=lines, text=True, cwd=path, check=True)
    assert sum(file["num_bytes"] for file in manifest["files"]) == sum(
        file.stat().st_size for file in path.glob("*.pt")
    )


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept_and_latest_points_to_the_last(tmp_path: Path, keep: int) -> None:
    for step in range(1, 5):
        save(tmp_path, step, state_of(step), keep)
        assert (tmp_path / "latest").readlink() == Path(f"step_{step:08d}")
        check_state(tmp_path / "latest", step)
    assert names(tmp_path) == ["latest", *[f"step_{step:08d}" for step in range(1, 5)][-keep:]]


def test_latest_in_a_copy_that_followed_the_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 1, state_of(1), keep=2)
    folder = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    assert not (folder / "latest").is_symlink()
    save(folder, 2, state_of(2), keep=2)
    assert (folder / "latest").readlink() == Path("step_00000002")


def test_newest_goes_by_number_beyond_eight_digits(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000):
        save(tmp_path, step, state_of(step), keep=2)
    path, _ = newest(tmp_path)
    check_state(path, 100_000_000)
    assert names(tmp_path) == ["latest", "step_100000000", "step_99999999"]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated state": (lambda path: os.truncate(path / "state.pt", 100), "state.pt has 100 bytes instead of"),
    "state with a flipped bit": (lambda path: flip(path / "state.pt", 300), "state.pt is damaged"),
    "no state": (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
    "state is a folder": (lambda path: _make_folder(path / "state.pt"), "state.pt"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
    "empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json"),
    "truncated manifest": (lambda path: os.truncate(path / "manifest.json", 60), "manifest.json"),
    "manifest is a list": (lambda path: _write(path, "[]"), "manifest.json"),
    "manifest without files": (lambda path: _write(path, '{"format": 2, "step": 2}'), "manifest.json"),
    "manifest of files that are none": (lambda path: _write(path, '{"format": 2, "files": [1]}'), "manifest.json"),
    "manifest of another format": (lambda path: _write(path, '{"format": 99, "files": {}}'), "format 99"),
    "manifest of another hash": (lambda path: _write(path, _with(path, algorithm="md6")), "manifest.json"),
    "huge manifest": (lambda path: os.truncate(path / "manifest.json", 2**40), "manifest.json cannot be read"),
    "manifest of endless depth": (lambda path: _write(path, "[" * 10**6), "manifest.json cannot be read"),
    "more ranks than files": (lambda path: _write(path, _intact(path, ranks=10**15)), "ranks, but 3 files"),
    "a count that is none": (lambda path: _write(path, _intact(path, step=2.5)), "step = 2.5"),
    "a file of another folder": (
        lambda path: _write(path, _intact(path, files=_elsewhere)),
        "no name of a file in its",
    ),
    "no part": (lambda path: (path / "rank_00001.pt").unlink(), "rank_00001.pt is missing"),
}


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _write(path: Path, manifest: str) -> None:
    (path / "manifest.json").write_text(manifest)


def _with(path: Path, **changes: Any) -> str:
    """The manifest with other values, in the same spelling."""
    return json.dumps({**json.loads((path / "manifest.json").read_text()), **changes}, indent=2) + "\n"


_elsewhere = (File("../step_00000001/state.pt", 1, ""),) * 9


def _intact(path: Path, **changes: Any) -> str:
    """The manifest with other values, and the checksum that goes with them."""
    return dataclasses.replace(read_manifest(path), **changes).text()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_passed_over_and_never_loaded(tmp_path: Path, damage: str) -> None:
    """Behaviours 41, 42."""
    do, words = DAMAGES[damage]
    good = save(tmp_path, 1, state_of(1), keep=3)
    bad = save(tmp_path, 2, state_of(2), keep=3)
    do(bad)
    path, passed_over = newest(tmp_path)
    assert path == good
    check_state(path, 1)
    (line,) = passed_over
    assert bad.name in line and words in line
    with pytest.raises(CheckpointError, match=bad.name) as caught:
        load(bad)
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "every", "bits"), [("manifest.json", 1, (0, 5)), ("state.pt", 97, (0, 3, 7))])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, name: str, every: int, bits: tuple[int, ...]) -> None:
    """Behaviour 42, byte by byte of the manifest."""
    path = save(tmp_path, 3, state_of(3), keep=1)
    for byte in range(0, (path / name).stat().st_size, every):
        for bit in bits:
            flip(path / name, byte, bit)
            assert name in str(find_fault(path)), (byte, bit)
            flip(path / name, byte, bit)
    assert find_fault(path) is None


def test_all_damaged_files_are_listed(tmp_path: Path) -> None:
    path = save(tmp_path, 3, state_of(3), keep=1)
    flip(path / "state.pt", 50)
    (path / "rank_00000.pt").unlink()
    found = list(find_faults(path, read_manifest(path)))
    assert [line.split()[0] for line in found] == ["rank_00000.pt", "state.pt"]
    assert list(find_faults(path, read_manifest(path), ["rank_00001.pt"])) == []


def test_nothing_usable_says_why_for_each(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}"):
        newest(tmp_path)
    for step in (1, 2):
        path = save(tmp_path, step, state_of(step), keep=3)
        (path / "state.pt").unlink()
    with pytest.raises(CheckpointError) as caught:
        newest(tmp_path)
    text = str(caught.value)
    assert str(tmp_path) in text and "step_00000001" in text and "step_00000002" in text


@pytest.mark.parametrize(
    "name",
    [
        "step_00000002_best",
        "step_best",
        "step_00000002.aside",
        "step_2",
        "step_0000000002",
        "step_٠٠٠٠٠٠٠٢",
        "latest_good",
    ],
)
def test_only_exact_names_are_checkpoints(tmp_path: Path, name: str) -> None:
    """Behaviour 54: a copy is the user's: not counted, not taken, not removed."""
    for step in range(1, 6):
        save(tmp_path, step, state_of(step), keep=2)
        if step == 2:
            shutil.copytree(tmp_path / "step_00000002", tmp_path / name)
    check_state(tmp_path / name, 2)
    assert names(tmp_path) == sorted(["latest", "step_00000004", "step_00000005", name])
    assert newest(tmp_path) == (tmp_path / "step_00000005", [])


@pytest.mark.parametrize("name", ["step_00000002.tar", "step_00000003", ".partial-step_1.txt", ".removed-notes"])
def test_files_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("the user's")
    for step in (1, 2, 4, 5):
        save(tmp_path, step, state_of(step), keep=1)
    assert (tmp_path / name).read_text() == "the user's"
    assert newest(tmp_path) == (tmp_path / "step_00000005", [])


def test_what_was_passed_over_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Behaviours 41, 54: unreadable when the run was resumed before it, perhaps only then. It is never resumed from."""
    for step in (1, 8, 9):
        save(tmp_path, step, state_of(step), keep=3)
    with caplog.at_level("WARNING", "mpidp"):
        for step in (2, 8, 10, 11, 12):
            check_state(save(tmp_path, step, state_of(step), keep=1), step)
            assert newest(tmp_path)[0].name == f"step_{step:08d}"
    assert names(tmp_path) == ["latest", "step_00000008.aside", "step_00000009.aside", "step_00000012"]
    check_state(tmp_path / "step_00000009.aside", 9)
    assert sum("it is kept as step_0000000" in record.getMessage() for record in caplog.records) == 2


def test_a_checkpoint_that_is_a_link_is_not_followed_when_it_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(tmp_path, 1, state_of(1), keep=1)
    folder.mkdir()
    (folder / "step_00000001").symlink_to(tmp_path / "step_00000001")
    assert newest(folder)[0] == folder / "step_00000001"
    save(folder, 2, state_of(2), keep=1)
    assert names(folder) == ["latest", "step_00000002"]
    check_state(tmp_path / "step_00000001", 1)


@pytest.mark.job
def test_what_another_job_is_writing_is_left_alone(tmp_path: Path) -> None:
    """Behaviour 54: removed once that job is gone; of one on another node, once nothing has been written for long."""
    other = subprocess.Popen(["sleep", "100"])
    started = int(Path(f"/proc/{other.pid}/stat").read_text().split()[21])
    here = Process.this()
    for number, process in enumerate(
        [
            Process(other.pid, started, here.namespace, here.host),
            Process(other.pid, started + 1, here.namespace, here.host),  # its number, but another process
            Process(7, 7, here.namespace, "another.node"),
            Process(7, 7, here.namespace + 1, here.host),  # in another container
            here,
        ]
    ):
        (tmp_path / f".partial-step_00000009-{number}-a1b2@{process}").mkdir()
    save(tmp_path, 1, state_of(1), keep=1)
    left = sorted(name.split("-")[2] for name in names(tmp_path) if name.startswith("."))
    assert left == ["0", "2", "3"]
    other.kill()
    other.wait()
    for path in tmp_path.glob(".partial-*"):
        os.utime(path, (time.time() - 200,) * 2)
    save(tmp_path, 2, state_of(2), keep=1)
    assert names(tmp_path) == ["latest", "step_00000002"]
