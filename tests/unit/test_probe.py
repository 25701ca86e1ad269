"""The test of device memory, run on the CPU: its child must come through where nothing is wrong with MPI."""

from mpidp.world.device import probe_in_child


def test_the_child_passes_where_mpi_handles_the_memory() -> None:
    """Behaviour 47: a probe that could never pass would send every GPU's gradients through the host."""
    assert probe_in_child("cpu") is None


def test_a_child_that_fails_says_why() -> None:
    failure = probe_in_child("no such device")
    assert failure is not None and "exit code" in failure
