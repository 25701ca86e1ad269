"""The records of a run: its folder, metrics, progress and traces."""
