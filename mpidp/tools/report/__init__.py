"""The page about runs behind `mpidp report`. Needs neither torch nor MPI."""
