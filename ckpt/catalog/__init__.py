"""Find, read, verify, repair and copy the checkpoints on a tier.

This package does not import torch, so the commands that use it start fast.
"""
