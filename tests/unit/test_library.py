"""Which of the files in a process's memory are MPI libraries, and which MPICH's shared memory."""

from mpidp.world.library import mapped_mpi_libraries
from mpidp.world.rank_memory import shared_files

MAPS = """\
7f0e1c000000-7f0e1c306000 rw-s 00000000 00:1a 2201    /dev/shm/mpich_shm_8d5207e2_0
7f0e1c306000-7f0e1c406000 rw-s 00306000 00:1a 2201    /dev/shm/mpich_shm_8d5207e2_0
7f0e20000000-7f0e20001000 rw-s 00000000 00:1a 2202    /dev/shm/mpich_shm_12ab_1 (deleted)
7f0e20002000-7f0e20003000 rw-s 00000000 00:1a 2203    /dev/shm/torch_1234_0
7f0e20004000-7f0e20005000 rw-p 00000000 00:00 0
7f0e20006000-7f0e20007000 rw-s 00000000 00:1a 2204    /home/someone/dev/shm/mpich_shm_12_0
7f0000000000-7f0000001000 r--p 00000000 fd:00 101 /opt/my mpi/lib/libmpi.so.40.40.7
7f0000001000-7f0000002000 r-xp 00001000 fd:00 101 /opt/my mpi/lib/libmpi.so.40.40.7
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7f0000003000-7f0000004000 r--p 00000000 fd:00 102 /usr/lib/libmpich.so.12.4.1
7f0000004000-7f0000005000 r--p 00000000 fd:00 103 /opt/cray/lib/libmpi_gnu_123.so.12
7f0000005000-7f0000006000 r--p 00000000 fd:00 104 /usr/lib/libmpfr.so.6
7f0000006000-7f0000007000 r--p 00000000 fd:00 105 /opt/libmpi.folder/libc.so.6
7f0000007000-7f0000008000 rw-p 00000000 00:00 0 [stack]
"""


def test_mapped_files() -> None:
    """Each library once, in order, also from a folder with a blank; of MPICH's shared files those that have a name."""
    assert mapped_mpi_libraries(MAPS) == [
        "/opt/my mpi/lib/libmpi.so.40.40.7",
        "/usr/lib/libmpich.so.12.4.1",
        "/opt/cray/lib/libmpi_gnu_123.so.12",
    ]
    assert shared_files(MAPS) == ["/dev/shm/mpich_shm_8d5207e2_0"]
    assert mapped_mpi_libraries("") == shared_files("") == []
