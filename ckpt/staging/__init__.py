"""Copy the state of a save to host memory: slots, images that are laid out in slots, snapshots that
fill images, and the fence that holds optimizers until their tensors are copied.
"""
