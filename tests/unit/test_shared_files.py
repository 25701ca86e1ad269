"""Which of a process's files are MPICH's shared memory, from a recorded /proc/self/maps."""

from mpidp.world.shared_memory import shared_files

MAPS = """\
7f0e1c000000-7f0e1c306000 rw-s 00000000 00:1a 2201    /dev/shm/mpich_shm_8d5207e2_0
7f0e1c306000-7f0e1c406000 rw-s 00306000 00:1a 2201    /dev/shm/mpich_shm_8d5207e2_0
7f0e20000000-7f0e20001000 rw-s 00000000 00:1a 2202    /dev/shm/mpich_shm_12ab_1 (deleted)
7f0e20002000-7f0e20003000 rw-s 00000000 00:1a 2203    /dev/shm/torch_1234_0
7f0e20004000-7f0e20005000 rw-p 00000000 00:00 0
7f0e20006000-7f0e20007000 rw-s 00000000 00:1a 2204    /home/someone/dev/shm/mpich_shm_12_0
"""


def test_mpichs_own_files_that_have_a_name() -> None:
    assert shared_files(MAPS) == ["/dev/shm/mpich_shm_8d5207e2_0"]
    assert shared_files("") == []
