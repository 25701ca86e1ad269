"""Files of checkpoints: written in the background, published by a rename, checked before they are read."""
