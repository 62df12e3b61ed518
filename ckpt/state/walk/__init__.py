"""Walk over a state: find its tensors with their names, build the tree of all other values, and
prepare the save plan.
"""
