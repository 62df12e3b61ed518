"""Copy the state of a save to host memory.

The package has slots, images that are laid out in slots, snapshots that fill images, and the fence
that holds the steps of optimizers until their tensors are copied.
"""
