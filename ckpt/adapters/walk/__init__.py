"""The walk over a state. It finds the tensors with their names, builds the tree of everything else,
and prepares the save plan.
"""
