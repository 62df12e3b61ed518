"""Restore a state: load the newest intact step, which is the same step on all ranks."""
