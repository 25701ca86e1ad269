"""What a user runs around a training run; each tool is one module with one entry function."""
