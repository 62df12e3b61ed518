"""Ranks agreeing without collectives: the contract of a coordinator, and the commit protocol as a state machine. Torch-free."""
