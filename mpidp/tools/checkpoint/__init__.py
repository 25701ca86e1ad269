"""Checkpoints in; lists, verdicts and files for other programs out: behind `mpidp checkpoint`."""
