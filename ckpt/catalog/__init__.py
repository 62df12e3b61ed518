"""Committed checkpoints on a tier: find, verify, fetch.

The command line uses this package, which does not import torch.
"""
