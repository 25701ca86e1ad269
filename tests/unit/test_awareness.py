"""What an MPI library says of itself and what a proof shows come in; the decision on device memory is looked at."""

import pytest

from mpidp.errors import LaunchError
from mpidp.world.device import decide
from mpidp.world.library import mapped_mpi_libraries


class Proof:
    """A probe that counts how often it ran."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.runs = 0

    def __call__(self) -> str | None:
        self.runs += 1
        return self.failure


@pytest.mark.parametrize("hint", [True, None])
def test_passed_proof_decides(hint: bool | None) -> None:
    """Behaviour 47: proven by value, whatever the library says."""
    proof = Proof()
    awareness = decide({}, hint, proof)
    assert awareness.aware
    assert proof.runs == 1
    assert "right result" in awareness.reason


@pytest.mark.parametrize("hint", [True, None])
def test_failed_proof_decides_and_is_quoted(hint: bool | None) -> None:
    """Behaviour 47: the library's own yes is only a hint."""
    proof = Proof("exit code -11: Segmentation fault")
    awareness = decide({}, hint, proof)
    assert not awareness.aware
    assert proof.runs == 1
    assert "exit code -11: Segmentation fault" in awareness.reason


def test_a_library_that_says_no_is_not_tried() -> None:
    """Behaviour 47."""
    proof = Proof()
    awareness = decide({}, False, proof)
    assert not awareness.aware
    assert proof.runs == 0
    assert "does not support" in awareness.reason


@pytest.mark.parametrize("hint", [True, False, None])
@pytest.mark.parametrize("value", ["0", "1"])
def test_override_wins_without_a_proof(value: str, hint: bool | None) -> None:
    proof = Proof("would fail" if value == "1" else None)
    awareness = decide({"MPIDP_CUDA_AWARE": value}, hint, proof)
    assert awareness.aware is (value == "1")
    assert proof.runs == 0
    assert f"MPIDP_CUDA_AWARE={value}" in awareness.reason


@pytest.mark.parametrize("value", ["", "yes", "true", "2", " 1"])
def test_bad_override_is_an_error_not_a_guess(value: str) -> None:
    proof = Proof()
    with pytest.raises(LaunchError) as caught:
        decide({"MPIDP_CUDA_AWARE": value}, None, proof)
    for part in ("MPIDP_CUDA_AWARE", repr(value), "0", "1"):
        assert part in str(caught.value)
    assert proof.runs == 0


def test_mapped_mpi_libraries() -> None:
    """Each library once, in order, also from a folder with a blank; no other library."""
    maps = """\
7f0000000000-7f0000001000 r--p 00000000 fd:00 101 /opt/my mpi/lib/libmpi.so.40.40.7
7f0000001000-7f0000002000 r-xp 00001000 fd:00 101 /opt/my mpi/lib/libmpi.so.40.40.7
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000003000-7f0000004000 r--p 00000000 fd:00 102 /usr/lib/libmpich.so.12.4.1
7f0000004000-7f0000005000 r--p 00000000 fd:00 103 /opt/cray/lib/libmpi_gnu_123.so.12
7f0000005000-7f0000006000 r--p 00000000 fd:00 104 /usr/lib/libmpfr.so.6
7f0000006000-7f0000007000 r--p 00000000 fd:00 105 /opt/libmpi.folder/libc.so.6
7f0000007000-7f0000008000 rw-p 00000000 00:00 0 [stack]
"""
    assert mapped_mpi_libraries(maps) == [
        "/opt/my mpi/lib/libmpi.so.40.40.7",
        "/usr/lib/libmpich.so.12.4.1",
        "/opt/cray/lib/libmpi_gnu_123.so.12",
    ]
    assert mapped_mpi_libraries("") == []
