"""Describe the tensors of a state: their layout, memory, and the ranks that hold the same ones."""
