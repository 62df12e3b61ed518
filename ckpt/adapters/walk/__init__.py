"""A state -> its tensors with names, a tree of everything else, and a plan to save them."""
