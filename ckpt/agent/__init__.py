"""The agent: a process for each node and user that outlives the trainer, and finishes what the
trainer could not.
"""
