"""How much memory is left: the node's, and what control groups of either version leave of it."""

from pathlib import Path

import pytest

from mpidp.world.system import available_memory

KIB = 1024
MEMORY = {"memory.max": "{} \n", "memory.current": "{}\n", "memory.stat": "anon 1\ninactive_file {}\n"}
MEMORY_1 = {
    "memory.limit_in_bytes": "{}\n",
    "memory.usage_in_bytes": "{}\n",
    "memory.stat": "anon 1\ntotal_inactive_file {}\n",
}


@pytest.mark.parametrize(
    "membership, groups, left_kib",
    [
        ("0::/\n", {}, 1000),  # without control groups the node's memory counts
        (  # the job's limit is the step's parent's; cached files give way
            "0::/slurm/job_7/step_0\n",
            {
                "slurm/job_7/step_0": ("max", 0, 0),
                "slurm/job_7": (500 * KIB, 100 * KIB, 30 * KIB),
                "slurm": (900 * KIB, 100 * KIB, 0),
            },
            430,
        ),
        # Version 1. In a container the group's path is the host's, and what is mounted is the group itself.
        ("12:cpuset,memory:/docker/abc\n3:cpu:/docker/abc\n", {"memory": (200 * KIB, 150 * KIB, 0)}, 50),
        ("0::/a\n", {"a": (200, 300, 0)}, 0),  # never less than nothing
    ],
    ids=["no limit", "version 2", "version 1", "nothing left"],
)
def test_memory_left(
    tmp_path: Path, membership: str, groups: dict[str, tuple[int | str, int, int]], left_kib: int
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert available_memory(proc, cgroups) is None
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    (proc / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    1000 kB\n")
    cgroups.mkdir()
    for path, values in groups.items():
        folder = cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for (name, text), value in zip((MEMORY_1 if path == "memory" else MEMORY).items(), values, strict=True):
            (folder / name).write_text(text.format(value))
    assert available_memory(proc, cgroups) == left_kib * KIB


@pytest.mark.job
def test_this_machine() -> None:
    """Some memory is left, and less than a petabyte."""
    found = available_memory()
    assert found is not None and 0 < found < 2**50
