"""A model, batches and reducers in, a trained model out: wrapper, trainer, checkpoints, metrics."""
