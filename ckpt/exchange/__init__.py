"""Tensors of a checkpoint by name, and exports to and imports from other formats."""
