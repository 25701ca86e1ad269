"""Which errors tell of the death of a rank, and when it can be survived; metrics cut off in the middle of a line."""

import gc
import weakref
from pathlib import Path

import pytest

from mpidp.train.records.recorder import whole_lines
from mpidp.world import mpi
from mpidp.world.mpi import MPI

OPEN_MPI = "Open MPI v5.0.11, package: somebody's"


@pytest.mark.parametrize(
    ("environment", "library", "ends_mpi", "words"),
    [
        ({"OMPI_MCA_mpi_ft_enable": "1"}, OPEN_MPI, True, ""),
        ({"OMPI_MCA_mpi_ft_enable": "true"}, OPEN_MPI, True, ""),
        ({}, OPEN_MPI, True, "--with-ft ulfm"),
        ({"OMPI_MCA_mpi_ft_enable": "0"}, OPEN_MPI, True, "--with-ft ulfm"),
        ({"OMPI_MCA_mpi_ft_enable": "1"}, "Open MPI v4.1.6, package: x", True, "Open MPI v4.1.6"),
        ({"OMPI_MCA_mpi_ft_enable": "1"}, "MPICH Version:      4.3.2\nMore", True, "MPICH Version:"),
        ({"OMPI_MCA_mpi_ft_enable": "1"}, OPEN_MPI, False, "import mpidp first"),
        ({}, "", True, "this MPI"),
    ],
)
def test_why_a_job_cannot_go_on(environment: dict[str, str], library: str, ends_mpi: bool, words: str) -> None:
    """Behaviour 31: the option says why it does nothing."""
    reason = mpi.why_not(environment, library, ends_mpi)
    assert (words in reason) if words else reason == ""


def test_an_error_that_came_from_a_loss_is_one() -> None:
    """Behaviour 31: whatever the error was turned into on its way."""
    loss = MPI.Exception(MPI.ERR_PROC_FAILED)
    try:
        try:
            raise loss
        except MPI.Exception as error:
            raise RuntimeError("reading failed") from error
    except RuntimeError as error:
        assert mpi.is_loss(error)
    assert mpi.is_loss(loss)
    assert not mpi.is_loss(RuntimeError("reading failed"))
    assert not mpi.is_loss(MPI.Exception(MPI.ERR_TRUNCATE))


def test_nothing_is_survived_unless_asked_for() -> None:
    """Behaviour 30: the death of a rank ends the job."""
    assert not mpi.is_elastic()
    assert not mpi.is_survived(MPI.Exception(MPI.ERR_PROC_FAILED))


def test_errors_that_name_each_other_end_the_search() -> None:
    """Two exceptions may each be the context of the other."""
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__context__, other.__context__ = other, one
    assert not mpi.is_loss(one)


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

    class Buffer:
        """Something that can be referred to weakly."""

    dropped, used, later = Buffer(), Buffer(), Buffer()
    references = [weakref.ref(buffer) for buffer in (dropped, used, later)]
    mpi.keep_at_loss(dropped, used)
    del dropped
    mpi.forget_all()
    mpi.forget_all()  # one more rank was lost meanwhile: still the same loss
    del used
    gc.collect()
    assert [reference() is not None for reference in references] == [False, True, True]
    mpi.keep_at_loss(later)
    mpi.forget_all()
    gc.collect()
    assert [reference() is not None for reference in references] == [False, False, True]
    mpi._kept.clear()


@pytest.mark.parametrize(("text", "length"), [("", 0), ("{}\n", 3), ("{}\n{", 3), ("{}\n{}\n", 6), ("{", 0)])
def test_a_line_that_was_cut_off_is_no_line(text: str, length: int, tmp_path: Path) -> None:
    """Behaviour 31: rank 0 may die while it writes a record."""
    (tmp_path / "metrics.jsonl").write_text(text)
    assert whole_lines(tmp_path / "metrics.jsonl") == length
