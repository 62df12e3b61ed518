"""A stored checkpoint -> the tensors and values of a state that it fills."""
