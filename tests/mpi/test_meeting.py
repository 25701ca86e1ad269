"""Ranks that meet without torch: what each gives reaches rank 0, and what rank 0 says reaches each."""

import json
from dataclasses import asdict

import mpidp
from mpidp.world.library import describe, from_json
from mpidp.world.meeting import Meeting


def test_everybody_meets(world: mpidp.World) -> None:
    """Behaviour 46: under the same numbers as in training; and the guard of the job stays in place."""
    meeting = Meeting()
    try:
        assert (meeting.rank, meeting.size) == (world.rank, world.size)
        assert (meeting.node, meeting.num_nodes) == (world.node, world.num_nodes)
        gathered = meeting.gather(("fact", world.rank))
        expected = [("fact", rank) for rank in range(world.size)]
        assert gathered == (expected if world.rank == 0 else None)
        assert meeting.broadcast("word" if world.rank == 0 else None) == "word"
        offsets_s = meeting.clock_offsets()
        assert len(offsets_s) == (world.num_nodes if world.rank == 0 else 0)
        assert offsets_s[:1] == [0.0] * (world.rank == 0)
    finally:
        meeting.leave()
    assert world.all(True)


def test_the_library_says_the_same_of_itself_by_way_of_json(world: mpidp.World) -> None:
    """Behaviour 46: what a child prints is what this process knows."""
    library = describe()
    assert from_json(json.dumps(asdict(library))) == library
    assert library.size == world.size and library.thread_level.startswith("MPI_THREAD_")
    assert len(library.mapped.mpi) == 1
