"""A run under way in; what it leaves to be read out: folder, metrics, progress, traces."""
