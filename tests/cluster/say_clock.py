"""Ranks on hosts come in; rank 0 prints as JSON how far each one's clock is from its own, as measured and as it is."""

import json
import time

import mpidp
from mpidp.world.clock import read_clock

world = mpidp.init()
reading = read_clock(world)
# The wall clock is the same on all these hosts, so it tells how far apart the others are.
monotonic_ns = time.monotonic_ns() - time.time_ns()
true_ns = world.comm.bcast(monotonic_ns, root=0) - monotonic_ns
found = world.comm.gather({"offset_ns": reading.offset_ns, "error_ns": reading.error_ns, "true_ns": true_ns})
if world.rank == 0:
    print(json.dumps(found))
