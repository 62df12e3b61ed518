"""The matching of a checkpoint with a state, and the code that fills the state from it."""
