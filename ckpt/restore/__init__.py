"""Restoring: the newest intact step becomes the state, on all ranks the same step."""
