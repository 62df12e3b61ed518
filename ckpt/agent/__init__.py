"""The agent: a process for each node and user that outlives the trainer. It copies files for
trainers, verifies their steps, and finishes the steps of a job whose trainer has ended.
"""
