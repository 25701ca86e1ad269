"""Copies on the node: the same bytes, made once, refused with figures, and gone when nobody uses them."""

import gc
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from mpidp.errors import DataError
from mpidp.hdf5.modes import stage as staging
from mpidp.hdf5.modes.stage import Staging, choose_folder, copy_range, staged_root
from mpidp.world.system import file_system
from mpidp.world.world import World

SHARED_MEMORY = Path("/dev/shm")
ALONE = World.alone()


@pytest.fixture
def node() -> Iterator[Path]:
    """A folder on another file system than the sources, as a node's own disk would be; it must end up empty."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == Path("/tmp").stat().st_dev:
        pytest.skip("this machine has no second file system")
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


def make(path: Path, size: int, seed: int = 0) -> str:
    """Write a file of random bytes."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(np.random.default_rng(seed).bytes(size))
    return str(path)


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


def test_copies(node: Path, tmp_path: Path) -> None:
    """Files of the same name, an empty one, one given twice; with their names, private, and removed by close."""
    sizes = {"a/x.h5": 3_000_001, "b/x.h5": 17, "record.json": 0}
    sources = [make(tmp_path / name, size, size) for name, size in sizes.items()]
    copies = Staging([*sources, sources[0]], ALONE, folder=node)
    assert list(copies.paths) == sources
    for source, copy in copies.paths.items():
        assert Path(copy).read_bytes() == Path(source).read_bytes()
        assert Path(copy).name == Path(source).name and Path(copy).is_relative_to(node)
    assert stat.S_IMODE(staged_root(node).stat().st_mode) == 0o700
    assert "3 file(s)" in copies.line and "2.9 MiB copied" in copies.line
    assert not list(node.glob("**/part-*"))
    copies.close()
    copies.close()
    assert is_empty(node)


def test_a_second_user_copies_nothing(node: Path, tmp_path: Path) -> None:
    """Several loaders share a copy, which stays until the last has left."""
    source = make(tmp_path / "x.h5", 1000)
    first = Staging([source], ALONE, folder=node)
    number = os.stat(first.paths[source]).st_ino
    second = Staging([source, make(tmp_path / "y.h5", 10)], ALONE, folder=node)
    assert second.paths[source] == first.paths[source] and os.stat(first.paths[source]).st_ino == number
    assert " 0.0 MiB copied" in second.line
    first.close()
    assert Path(second.paths[source]).read_bytes() == Path(source).read_bytes()
    del second
    gc.collect()
    assert is_empty(node)


def test_a_source_that_changed_is_copied_again(node: Path, tmp_path: Path) -> None:
    """Size or time of change differ: another copy, and who has the old one keeps it."""
    source = make(tmp_path / "x.h5", 1000)
    old = Staging([source], ALONE, folder=node)
    make(tmp_path / "x.h5", 1000, seed=1)
    os.utime(source, ns=(0, 1))
    new = Staging([source], ALONE, folder=node)
    assert new.paths[source] != old.paths[source]
    assert Path(new.paths[source]).read_bytes() == Path(source).read_bytes() != Path(old.paths[source]).read_bytes()
    old.close()
    assert Path(new.paths[source]).exists()
    new.close()
    assert is_empty(node)


@pytest.mark.parametrize("damage", ["data", "record"])
def test_a_copy_that_was_tampered_with_is_copied_again(node: Path, tmp_path: Path, damage: str) -> None:
    """What does not match its record is not trusted."""
    source = make(tmp_path / "x.h5", 1000)
    first = Staging([source], ALONE, folder=node)
    copy = Path(first.paths[source])
    if damage == "data":
        copy.chmod(0o600)
        copy.write_bytes(b"0" * 1000)
    else:
        (copy.parent.parent / "record.json").write_text("{")
    second = Staging([source], ALONE, folder=node)
    assert Path(second.paths[source]).read_bytes() == Path(source).read_bytes()
    first.close()
    second.close()
    assert is_empty(node)


def test_a_source_that_changes_meanwhile(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is still written is not half copied."""
    source = make(tmp_path / "x.h5", 1000)

    def copy(*arguments: object) -> None:
        copy_range(*arguments)  # type: ignore[arg-type]
        make(tmp_path / "x.h5", 1001)

    monkeypatch.setattr(staging, "copy_range", copy)
    with pytest.raises(DataError, match=r"x\.h5: changed while it was copied"):
        Staging([source], ALONE, folder=node)
    assert is_empty(node)


def test_too_little_room(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed, what is there, where; only what is not there yet counts."""
    source = make(tmp_path / "x.h5", 1000)
    small = replace(file_system(node), free_bytes=999)
    monkeypatch.setattr(staging, "file_system", lambda _: small)
    with pytest.raises(DataError, match=r"has 999 bytes free, but 1,000 are needed for copies of 1 file"):
        Staging([source], ALONE, folder=node)
    assert is_empty(node)
    monkeypatch.undo()
    first = Staging([source], ALONE, folder=node)
    monkeypatch.setattr(staging, "file_system", lambda _: small)
    Staging([source], ALONE, folder=node).close()
    first.close()
    assert is_empty(node)


def test_a_disk_that_runs_full(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room that somebody else took meanwhile: said before a byte is copied, and nothing stays."""
    source = make(tmp_path / "x.h5", 1000)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"files cannot be staged there: .*No space left on device"):
        Staging([source], ALONE, folder=node)
    assert is_empty(node)


def test_a_disk_that_forgets(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read back is compared with what was read, not with what was meant to be written."""
    source = make(tmp_path / "x.h5", 1000)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, bytes(data)[:-1] + b"?", at))
    with pytest.raises(DataError, match=r"bytes 0 to 999 have CRC-32 [0-9a-f]{8} when read back"):
        Staging([source], ALONE, folder=node)
    assert is_empty(node)


def test_bytes_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems may write less than asked; blocks and ranges end anywhere."""
    monkeypatch.setattr(staging, "_COPIED_BYTES", 100)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    source, target = make(tmp_path / "x", 1000), make(tmp_path / "y", 1000, seed=1)
    staging.copy_range(source, target, 0, 333)
    staging.copy_range(source, target, 333, 1000)
    assert Path(source).read_bytes() == Path(target).read_bytes()
    with pytest.raises(DataError, match=r"x: ends at byte 1000, though it had at least 1001"):
        staging.copy_range(source, target, 990, 1001)


def test_what_cannot_be_copied(node: Path, tmp_path: Path) -> None:
    """A missing file and a folder, by name."""
    with pytest.raises(DataError, match=r"missing\.h5: cannot be copied to the node: No such file"):
        Staging([make(tmp_path / "x.h5", 10), str(tmp_path / "missing.h5")], ALONE, folder=node)
    with pytest.raises(DataError, match="it is not a file"):
        Staging([str(tmp_path)], ALONE, folder=node)
    assert is_empty(node)


def test_folders(tmp_path: Path) -> None:
    """The one given, then Slurm's, then the user's, then the system's; each must be there."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    assert choose_folder(a, {"SLURM_TMPDIR": str(b)}) == a
    assert choose_folder(None, {"SLURM_TMPDIR": str(b), "TMPDIR": str(a)}) == b
    assert choose_folder(None, {"SLURM_TMPDIR": "", "TMPDIR": str(a)}) == a
    assert choose_folder(None, {}).is_dir()
    with pytest.raises(DataError, match=r"c, given by SLURM_TMPDIR, is no folder"):
        choose_folder(None, {"SLURM_TMPDIR": str(tmp_path / "c")})
    with pytest.raises(DataError, match="c, given by the folder to stage to, is no folder"):
        choose_folder(tmp_path / "c", {})


def test_the_same_file_system(tmp_path: Path) -> None:
    """Copying to where the source lies gains nothing: said once, and done all the same."""
    source = make(tmp_path / "x.h5", 10)
    (tmp_path / "node").mkdir()
    with pytest.warns(UserWarning, match=r"on the same file system as .*x\.h5: that gains nothing"):
        copies = Staging([source], ALONE, folder=tmp_path / "node")
    assert Path(copies.paths[source]).read_bytes() == Path(source).read_bytes()
    copies.close()
    assert is_empty(tmp_path / "node")


def test_a_network_file_system(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A $TMPDIR on NFS is no faster than the source."""
    network = replace(file_system(node), kind="nfs4")
    monkeypatch.setattr(staging, "file_system", lambda _: network)
    with pytest.warns(UserWarning, match=r"is a network file system \(nfs4\)"):
        Staging([make(tmp_path / "x.h5", 10)], ALONE, folder=node).close()
    assert is_empty(node)


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    """The kernel's list says it by number of device; the last mount of a device counts."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 {number} / / rw - ext4 /dev/a rw\n30 1 0:99 / /x rw shared:1 - nfs4 s:/x rw\n"
        f"31 1 {number} /y /y\\040z rw master:2 - lustre h:/y rw\n"
    )
    found = file_system(tmp_path, mounts)
    assert (found.kind, found.is_network, found.device) == ("lustre", True, device)
    assert file_system(tmp_path, tmp_path / "none").kind == ""
    assert file_system(tmp_path).free_bytes > 0 and not file_system(tmp_path).is_network


def test_the_folder_of_somebody_else(node: Path, tmp_path: Path) -> None:
    """Copies in a folder that others may write to could be anything."""
    staged_root(node).mkdir()
    staged_root(node).chmod(0o777)
    with pytest.raises(DataError, match="others may read or write it"):
        Staging([make(tmp_path / "x.h5", 10)], ALONE, folder=node)
    staged_root(node).rmdir()


PROGRAM = """
import os, sys, time
from mpidp.hdf5.modes.stage import Staging
from mpidp.world.world import World
copies = Staging(sys.argv[2:], World.alone(), folder=sys.argv[1])
print(*copies.paths.values(), flush=True)
what = sys.stdin.readline().strip()
if what == "raise":
    raise RuntimeError("the run fails")
if what == "fork":
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    print(all(map(os.path.exists, copies.paths.values())), flush=True)
    sys.stdin.readline()
"""


def start(node: Path, source: str) -> tuple["subprocess.Popen[str]", Path]:
    """Start a process that stages a file and waits for a word; return it and where the copy is."""
    command = [sys.executable, "-c", PROGRAM, str(node), source]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.job
@pytest.mark.parametrize("word, code", [("end", 0), ("raise", 1)])
def test_the_end_of_the_process(node: Path, tmp_path: Path, word: str, code: int) -> None:
    """Copies are gone without a call of close, also after an exception that nobody caught."""
    process, copy = start(node, make(tmp_path / "x.h5", 10))
    assert copy.exists()
    _, errors = process.communicate(word + "\n")
    assert process.returncode == code, errors
    assert is_empty(node)


@pytest.mark.job
def test_a_fork_leaves_copies_alone(node: Path, tmp_path: Path) -> None:
    """A child that ends is not the end of its parent."""
    process, _ = start(node, make(tmp_path / "x.h5", 10))
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("fork\n")
    process.stdin.flush()
    assert process.stdout.readline() == "True\n"
    process.communicate("\n")
    assert process.returncode == 0 and is_empty(node)


@pytest.mark.job
def test_what_a_killed_job_leaves(node: Path, tmp_path: Path) -> None:
    """The next start removes it, and nothing that a living process uses."""
    source, other, third = (make(tmp_path / f"{name}.h5", 10) for name in "xyz")
    killed, dead_copy = start(node, source)
    living, copy = start(node, other)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    part = dead_copy.parent.parent / "part-left"
    part.write_bytes(b"half a copy")
    assert dead_copy.exists()
    mine = Staging([third], ALONE, folder=node)
    assert not dead_copy.exists() and not part.exists()
    assert copy.exists() and Path(mine.paths[third]).exists()
    mine.close()
    living.communicate("end\n")
    assert is_empty(node)


@pytest.mark.job
def test_a_copy_of_a_killed_job_is_used_by_the_next(node: Path, tmp_path: Path) -> None:
    """Where a living process uses it too, nothing is copied again."""
    source = make(tmp_path / "x.h5", 10)
    killed, copy = start(node, source)
    mine = Staging([source], ALONE, folder=node)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert mine.paths[source] == str(copy) and copy.exists()
    mine.close()
    assert is_empty(node)


@pytest.mark.job
def test_many_processes_at_once(node: Path, tmp_path: Path) -> None:
    """Six processes that begin and end together: each sees the whole file, and in the end nothing is left."""
    source = make(tmp_path / "x.h5", 200_000)
    started = [start(node, source) for _ in range(2)]
    command = [sys.executable, "-c", PROGRAM, str(node), source]
    more = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in [process for process, _ in started] + more:
        assert process.stdin is not None
        process.stdin.write("end\n")
        process.stdin.flush()
    for process in [process for process, _ in started] + more:
        process.communicate()
        assert process.returncode == 0
    assert is_empty(node)


@pytest.mark.job
def test_waiting_for_another_process(node: Path) -> None:
    """Who waits for the lock of a folder that is then removed makes a new one."""
    root = staged_root(node)
    program = (
        f"import time; from pathlib import Path; from mpidp.hdf5.modes.stage import locked\n"
        f"with locked(Path({str(root)!r})): print(1, flush=True); time.sleep(0.5)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    with staging.locked(root):
        assert process.communicate() == ("", None) and process.returncode == 0
        assert root.exists()
    assert is_empty(node)


def test_who_uses_it(node: Path, tmp_path: Path) -> None:
    """A mark tells people which process it is."""
    copies = Staging([make(tmp_path / "x.h5", 10)], ALONE, folder=node)
    (mark,) = staged_root(node).glob("user-*")
    assert json.loads(mark.read_text())["pid"] == os.getpid()
    copies.close()
