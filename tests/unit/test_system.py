"""How much memory is left: the node's, and what control groups of either version leave of it."""

from pathlib import Path

import pytest

from mpidp.world.system import available_memory

KIB = 1024


def tree(root: Path, membership: str, available_kib: int | None = 1000) -> tuple[Path, Path]:
    """Make a /proc and an empty /sys/fs/cgroup."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "self" / "cgroup").write_text(membership)
    if available_kib is not None:
        (proc / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable:    {available_kib} kB\n")
    return proc, cgroups


def group(folder: Path, version: int, limit: str, usage: int, cached: int) -> None:
    """Make one control group."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file {cached}\n")


@pytest.mark.job
def test_this_machine() -> None:
    """Some memory is left, and less than a petabyte."""
    found = available_memory()
    assert found is not None and 0 < found < 2**50


def test_no_limit(tmp_path: Path) -> None:
    """Without control groups the node's memory counts."""
    assert available_memory(*tree(tmp_path, "0::/\n")) == 1000 * KIB


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    """Version 2: the job's limit is the step's parent's; cached files give way."""
    proc, cgroups = tree(tmp_path, "0::/slurm/job_7/step_0\n")
    group(cgroups / "slurm" / "job_7" / "step_0", 2, "max", 0, 0)
    group(cgroups / "slurm" / "job_7", 2, str(500 * KIB), 100 * KIB, 30 * KIB)
    group(cgroups / "slurm", 2, str(900 * KIB), 100 * KIB, 0)
    assert available_memory(proc, cgroups) == 430 * KIB


def test_version_1_and_a_path_of_the_host(tmp_path: Path) -> None:
    """In a container the group's path is the host's, and what is mounted is the group itself."""
    proc, cgroups = tree(tmp_path, "12:cpuset,memory:/docker/abc\n3:cpu:/docker/abc\n")
    group(cgroups / "memory", 1, str(200 * KIB), 150 * KIB, 0)
    assert available_memory(proc, cgroups) == 50 * KIB


@pytest.mark.parametrize("usage", [300, 200])
def test_nothing_left(tmp_path: Path, usage: int) -> None:
    """Never less than nothing."""
    proc, cgroups = tree(tmp_path, "0::/a\n")
    group(cgroups / "a", 2, "200", usage, 0)
    assert available_memory(proc, cgroups) == 0


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    """No /proc, no answer."""
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") is None
