"""What a run leaves to be read: its folder, metrics, progress and traces."""
