"""Stores that hold checkpoints: the contract of a backend, the registry of backends, and tiers."""
