"""Ways to do the same work in, their times in one fair run out: behind `mpidp bench`."""
