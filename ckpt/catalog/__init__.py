"""Committed checkpoints on a tier: find, verify, fetch.

Torch-free: the command line lives on this.
"""
