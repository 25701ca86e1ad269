"""Memory that MPICH shares as it starts: how much is enough, what is said if it is not, and whose files count."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpidp.world import launch as start_memory
from mpidp.world.launch import CELLS, TRANSPORTS, cannot_share, room_bytes, too_small

UCX = "MPICH Version: 5.0.2\nMPICH Device: ch4:ucx ofi\n"
OFI = "MPICH Version: 4.3.0\nMPICH Device: ch4:ofi\n"
KB, MB = 1 << 10, 1 << 20


@pytest.mark.parametrize("ranks, least", [(2, 2072), (3, 3104)])
def test_what_mpich_maps(ranks: int, least: int) -> None:
    """As it was measured, in kB: with 4 kB less it dies of SIGBUS."""
    text = too_small((least - 4) * KB, UCX, ranks, {})
    assert text and f"{least * KB:,} to start {ranks} rank(s)" in text and "--shm-size" in text
    assert too_small(least * KB, UCX, ranks, {}) is None
    assert too_small((least - 4) * KB, UCX, ranks, {CELLS: "2"}) is None


@pytest.mark.parametrize(
    "room, ranks, fits", [(15, 3, True), (16, 2, False), (24, 3, False), (29, 3, True), (64, 11, True)]
)
def test_ranks_of_which_some_use_shared_memory(room: int, ranks: int, fits: bool) -> None:
    """Where UCX finds enough on some ranks only they cannot talk to each other, and die of SIGSEGV."""
    assert (too_small(room * MB, UCX, ranks, {}) is None) == fits
    assert too_small(room * MB, UCX, ranks, {TRANSPORTS: "^posix"}) is None
    assert too_small(room * MB, OFI, ranks, {}) is None


def test_one_rank_is_at_odds_with_nobody() -> None:
    assert too_small(16 * MB, UCX, 1, {}) is None
    assert too_small(1 * MB, UCX, 1, {}) is not None


def test_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI looks before it takes."""
    monkeypatch.setattr(start_memory, "room_bytes", lambda folder: 0)
    assert cannot_share("Open MPI v5.0.11, package: ...", 4, {}) is None
    text = cannot_share(UCX, None, {})
    assert text and "0 bytes, and MPICH needs" in text


def test_files_of_this_job_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or ranks that come later would find less, and say something else."""
    assert room_bytes(tmp_path / "missing") is None
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=100, f_frsize=4096))
    assert room_bytes(tmp_path) == 409_600
    (tmp_path / "mpich_shm_0123abcd_0").write_bytes(bytes(100_000))
    assert room_bytes(tmp_path) == 409_600
    (tmp_path / "another").write_bytes(bytes(100_000))
    assert room_bytes(tmp_path) == 409_600 - (tmp_path / "another").stat().st_blocks * 512
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0, f_frsize=4096))
    assert room_bytes(tmp_path) is None  # size=0 is a tmpfs without a limit
