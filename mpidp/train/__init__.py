"""Training: the wrapper `DataParallel`, the trainer, checkpoints, metrics."""
