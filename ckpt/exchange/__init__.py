"""Read tensors of a checkpoint by name, and convert checkpoints to and from other formats."""
