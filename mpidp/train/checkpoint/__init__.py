"""States in, checkpoints that survive whatever comes later out; and back."""
