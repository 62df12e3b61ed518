"""The background half of a save: the image in host memory becomes a checkpoint on every tier."""
