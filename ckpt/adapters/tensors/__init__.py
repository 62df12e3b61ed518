"""Tensors of the state: their layout, their memory, and the ranks that hold the same tensors."""
