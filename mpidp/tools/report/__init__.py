"""Run folders in, a page about them out: behind `mpidp report`. Needs neither torch nor MPI."""
