"""Tensors of the state: their layout, the memory that holds them, and the ranks that share them."""
