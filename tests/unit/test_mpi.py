"""Which errors tell of the death of a rank, and when it can be survived; communicators and memory after a loss."""

import gc
import weakref
from pathlib import Path

import pytest

from mpidp.train.records.recorder import whole_lines
from mpidp.world import mpi
from mpidp.world.mpi import MPI

OPEN_MPI = "Open MPI v5.0.11, package: somebody's"
TOLERANT = {"OMPI_MCA_mpi_ft_enable": "1"}


@pytest.mark.parametrize(
    ("environment", "library", "ends_mpi", "words"),
    [
        (TOLERANT, OPEN_MPI, True, ""),
        ({"OMPI_MCA_mpi_ft_enable": "true"}, OPEN_MPI, True, ""),
        ({}, OPEN_MPI, True, "--with-ft ulfm"),
        ({"OMPI_MCA_mpi_ft_enable": "0"}, OPEN_MPI, True, "--with-ft ulfm"),
        (TOLERANT, "Open MPI v4.1.6, package: x", True, "Open MPI v4.1.6"),
        (TOLERANT, "MPICH Version:      4.3.2\nMore", True, "MPICH Version:"),
        (TOLERANT, OPEN_MPI, False, "import mpidp first"),
        ({}, "", True, "this MPI"),
    ],
)
def test_why_a_job_cannot_go_on(environment: dict[str, str], library: str, ends_mpi: bool, words: str) -> None:
    """Behaviour 31: the option says why it does nothing."""
    reason = mpi.why_not(environment, library, ends_mpi)
    assert (words in reason) if words else reason == ""


def test_an_error_that_came_from_a_loss_is_one() -> None:
    """Behaviours 30 and 31: whatever it was turned into on its way; nothing is survived unless asked for."""
    loss = MPI.Exception(MPI.ERR_PROC_FAILED)
    later, one, other = (RuntimeError("reading failed") for _ in range(3))
    later.__cause__ = loss
    one.__context__, other.__context__ = other, one  # two exceptions may each be the context of the other
    assert [*map(mpi.is_loss, (loss, later, one, MPI.Exception(MPI.ERR_TRUNCATE)))] == [True, True, False, False]
    assert not mpi.is_elastic() and not mpi.is_survived(loss)


def test_freed_communicators_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 31: to revoke what was freed would crash."""
    before = {*mpi._open}
    comm = mpi.opened(mpi.WatchedComm())
    assert {*mpi._open} == {*before, id(comm)}
    monkeypatch.setattr(mpi, "_is_elastic", True)  # so that MPI itself is not asked
    comm.Free()
    assert {*mpi._open} == before


def test_memory_that_messages_use_outlives_its_owner_at_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 31: until the next loss, as a message that was broken off may still arrive."""
    monkeypatch.setattr(mpi, "_open", {})
    monkeypatch.setattr(mpi, "_kept", [])

    class Buffer:
        """Something that can be referred to weakly."""

    buffers = {name: Buffer() for name in ("dropped", "used", "later")}
    references = {name: weakref.ref(buffer) for name, buffer in buffers.items()}

    def alive() -> list[str]:
        gc.collect()
        return [name for name, reference in references.items() if reference() is not None]

    mpi.keep_at_loss(buffers["dropped"], buffers["used"])
    del buffers["dropped"]
    mpi.forget_all()
    mpi.forget_all()  # one more rank was lost meanwhile: still the same loss
    del buffers["used"]
    assert alive() == ["used", "later"]
    mpi.keep_at_loss(buffers["later"])
    mpi.forget_all()
    assert alive() == ["later"]


@pytest.mark.parametrize(("text", "length"), [("", 0), ("{}\n", 3), ("{}\n{", 3), ("{}\n{}\n", 6), ("{", 0)])
def test_a_line_that_was_cut_off_is_no_line(text: str, length: int, tmp_path: Path) -> None:
    """Behaviour 31: rank 0 may die while it writes a record."""
    (tmp_path / "metrics.jsonl").write_text(text)
    assert whole_lines(tmp_path / "metrics.jsonl") == length
