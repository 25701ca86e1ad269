"""Started on every rank; rank 0 prints, as a list in the order of ranks, each rank's place and its clock's offset."""

import json
import time

import mpidp
from mpidp.world.clock import read_clock

world = mpidp.init()
reading = read_clock(world)
# The wall clock is the same on all these hosts, so it tells how far apart the others are.
monotonic_ns = time.monotonic_ns() - time.time_ns()
found = {
    "world": [world.rank, world.size, world.local_rank, world.local_size, world.node, world.num_nodes, world.host],
    "true_ns": world.comm.bcast(monotonic_ns, root=0) - monotonic_ns,
    "offset_ns": reading.offset_ns,
    "error_ns": reading.error_ns,
}
said = world.comm.gather(found)
if world.rank == 0:
    print(json.dumps(said))
