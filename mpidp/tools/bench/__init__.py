"""The benchmarks of `mpidp bench`: alternative ways to do the same work, timed in turn in one run."""
