"""Match a checkpoint with a state, and fill the state from the checkpoint."""
