"""Checkpoints and the rest of the world: tensors by name, other formats out and in.

The only room beside adapters, staging and the facade that knows torch.
"""
