"""`mpidp report`: a page about runs. Needs neither torch nor MPI."""
