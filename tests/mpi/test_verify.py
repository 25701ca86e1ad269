"""`mpidp data verify` on several ranks: the same report as on one, each chunk read once, by somebody."""

import sys
from pathlib import Path

import pytest

import mpidp
from mpidp.hdf5.files.file import open_file
from mpidp.tools.data.verify import Scan, verify_file

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from bad_data import damage, write_bad_values, write_sound


def test_the_report_is_the_same_on_any_number_of_ranks(world: mpidp.World, mpi_tmp_path: Path) -> None:
    """And on every rank of them."""
    paths = [mpi_tmp_path / name for name in ("sound.h5", "values.h5", "damaged.h5", "gone.h5")]
    if world.rank == 0:
        write_sound(paths[0])
        write_bad_values(paths[1])
        damage(write_sound(paths[2]), [0, 7, 8, 21, 39])
    world.barrier()
    for path, num_findings in zip(paths, (0, 5, 5, 1), strict=True):
        alone = verify_file(str(path), 20, mpidp.World.alone())
        together = verify_file(str(path), 20, world)
        assert together == alone
        assert together.num_findings == num_findings
        assert world.comm.allgather(together) == [alone] * world.size
    counted = verify_file(str(paths[2]), 2, world)
    assert (len(counted.findings), counted.num_findings) == (2, 5)


def test_chunks_are_dealt_to_ranks(world: mpidp.World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk is read by one rank, and every rank has some."""
    path = mpi_tmp_path / "in.h5"
    if world.rank == 0:
        write_sound(path)
    world.barrier()
    monkeypatch.setattr("mpidp.tools.data.scan.BLOCK_BYTES", 4000)
    mine: list[tuple[str, int]] = []
    read = Scan.read

    def noted(scan: Scan, file: str, dataset: object, work: object, number: int) -> None:
        mine.append((work.name, number))  # type: ignore[attr-defined]
        read(scan, file, dataset, work, number)  # type: ignore[arg-type]

    monkeypatch.setattr(Scan, "read", noted)
    verify_file(str(path), 20, world)
    shares = world.comm.allgather(mine)
    everything = [piece for share in shares for piece in share]
    assert all(shares)
    assert len(everything) == len(set(everything)) == 45  # at 4000 bytes a range, the contiguous dataset is two


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_read_the_file_fails_on_all(
    world: mpidp.World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behaviour 29: a node without the file system."""
    path = mpi_tmp_path / "in.h5"
    if world.rank == 0:
        write_sound(path)
    world.barrier()
    if world.rank == world.size - 1:
        monkeypatch.setattr("mpidp.tools.data.verify.open_file", lambda *_, **__: open_file("/gone/in.h5", 0))
    with pytest.raises(mpidp.errors.DataError, match=r"/gone/in\.h5: no such file"):
        verify_file(str(path), 20, world)
