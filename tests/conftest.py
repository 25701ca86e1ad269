"""Settings of all tests: one thread a process, and examples that are the same in every run and on every rank."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks share few cores

from hypothesis import settings

# Random examples would differ between ranks, and a deadline would be a timed assertion.
settings.register_profile("mpidp", derandomize=True, database=None, deadline=None, print_blob=True)
settings.load_profile("mpidp")
